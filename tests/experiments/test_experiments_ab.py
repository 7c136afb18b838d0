"""Every experiment of the first two documents holds, would notice if it did not, and can be shown from its JSON."""

import copy
import functools
import json
import math

import pytest
import torch
from matplotlib.figure import Figure as Canvas

from innerloop import experiments, ops
from innerloop.experiments.experiment import Settings
from innerloop.report import drawing

SLOWEST = ("A8", "A10", "B3", "B4", "B9")  # seconds each: run once
NAMES = [*(f"A{number}" for number in range(1, 13)), "B1", "B3", "B4", "B7", "B9"]

# What a wrong library, a wrong estimator or a missed digit would have left in the result: where, and what.
DOCTORED = [
    ("A1", ("w", 4), 1.7170),
    ("A1", ("loss", 0), 1.2600),
    ("A2", ("kept", -1), 1e-5),
    ("A2", ("held_out", -1), 1.0),
    ("A2", ("descent_kept", "w", 1), 1.5),
    ("A3", ("stages", "after 500 epochs", "w"), 1 / 0.583),
    ("A3", ("stages", "after 5 epochs", "neighbours"), 30.0),
    ("A3", ("last_move",), 0.02),
    ("A4", ("rows", 0, "recipe_error"), 2e-9),
    ("A4", ("rows", 5, "op_error"), 1e-8),
    ("A4", ("rows", 5, "model"), "another"),
    ("A4", ("fit_all",), 1e-6),
    ("A5", ("identity",), 1e-10),
    ("A5", ("mean_error",), [0.6960, 0.4300, 0.3100, 0.2700, 0.2500, 0.2500]),
    ("A5", ("mean_error", 0), 0.75),
    ("A5", ("exact_error",), 1e-3),
    ("A6", ("mse", "online GD, 1 pass"), 0.01),
    ("A6", ("objective", "online GD, 30 passes"), 9.0),
    ("A6", ("objective", "online GD, 300 more passes at a falling rate"), 3.53),
    ("A6", ("distance", "online GD, 5 passes"), 0.5),
    ("A6", ("recipe_and_op",), 1e-6),
    ("A6", ("recipe_and_equations",), 1e-6),
    ("A7", ("measures", "one-pass delta", "variation"), 9.0),
    ("A7", ("measures", "kernel smoother", "training"), 0.1),
    ("A7", ("measures", "one-pass delta", "span"), 2.0),
    ("A7", ("measures", "batch solve", "test"), 0.06),
    ("A8", ("float32", "linear_solve"), 2e-5),
    ("A8", ("float64", "descent"), 1e-9),
    ("A8", ("float64", "recipe"), 1e-9),
    ("A9", ("along", -1), 1e-3),
    ("A9", ("along", 3), -0.2),
    ("A9", ("elsewhere", 5), 1e-6),
    ("A9", ("growth",), 1e-6),
    ("A9", ("recall", "float64"), 1e-3),
    ("A10", ("identity",), 1e-6),
    ("A10", ("network",), 1e-6),
    ("A10", ("recall", "0.8", 1), 0.80),
    ("A10", ("recall", "0.0", 3), 0.99),
    ("A11", ("mean", 0), 0.0316),
    ("A11", ("mean", -1), 0.0025),
    ("A11", ("unbiased", "rule"), 0.00217),
    ("A11", ("unbiased",), {"rule": 0.02, "recipe": 0.02}),
    ("A12", ("drifting", "last", "implicit step"), 0.4),
    ("A12", ("drifting", "last", "uniform least squares"), 0.5),
    ("A12", ("stationary", "last", "uniform least squares"), 0.2),
    ("B1", ("delta", 1), 0.999),
    ("B1", ("hebbian", 2), 1.0),
    ("B3", ("float32", "value"), 2e-5),
    ("B3", ("float64", "gradient", "beta"), 1e-8),
    ("B4", ("float32", "256", "truth"), 1e-4),
    ("B4", ("float64", "64", "gradient"), 1e-9),
    ("B7", ("single_step",), 1e-9),
    ("B7", ("stream", "gated"), 1e-3),
    ("B9", ("along", 3), -0.9),
    ("B9", ("elsewhere", 0), 1e-6),
    ("B9", ("parity", "4096", "reflection"), 0.51),
    ("B9", ("parity", "64", "chunked"), 0.5),
    ("B9", ("parity", "8", "projection"), 0.9),
]


@functools.cache
def first_run(name):
    progress = []
    stored = json.dumps(experiments.load(name).run(Settings(progress=progress.append)))
    return stored, tuple(progress)


def result(name):
    stored, _ = first_run(name)
    return json.loads(stored)


def with_every_number(value, number):
    if isinstance(value, dict):
        return {key: with_every_number(inner, number) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_every_number(inner, number) for inner in value]
    return number if isinstance(value, int | float) else value


@pytest.mark.parametrize("name", NAMES)
def test_claim_is_reproduced(name):
    experiments.load(name).check(result(name))


@pytest.mark.parametrize(("name", "path", "value"), DOCTORED)
def test_check_fails_on_a_doctored_result(name, path, value):
    doctored = result(name)
    *way, last = path
    functools.reduce(lambda inner, key: inner[key], way, doctored)[last] = value
    with pytest.raises(AssertionError, match=r"\d"):
        experiments.load(name).check(doctored)


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_has_a_doctored_result(name):
    assert any(name == doctored for doctored, *_ in DOCTORED)


@pytest.mark.parametrize("name", NAMES)
def test_check_fails_where_nothing_is_a_number(name):
    with pytest.raises(AssertionError):
        experiments.load(name).check(with_every_number(result(name), math.nan))


def additive(q, k, v, *, beta, **options):
    return ops.linear_attention(q, k, v, **options)


def editing(q, k, v, **options):
    return ops.delta_rule(q, k, v, beta=torch.ones_like(v[..., 0]), **options)


def late(wrapped):
    def read_late(q, k, v, **options):
        o, state = wrapped(q, k, v, **options)
        return o.roll(1, 1), state

    return read_late


def without(gate, wrapped):
    return lambda *tokens, **options: wrapped(*tokens, **{name: x for name, x in options.items() if name != gate})


def scaled(gate, factor, wrapped):
    def call(*tokens, **options):
        return wrapped(*tokens, **{name: factor * x if name == gate else x for name, x in options.items()})

    return call


def explicit(wrapped):
    def step(rule, q, k, v, *, beta, state):
        rate = 1 / (1 + 1 / beta)
        return wrapped("delta_rule" if rule == "longhorn" else rule, q, k, v, beta=rate, state=state)

    return step


def capped(wrapped):
    def call(*tokens, beta, **options):
        return wrapped(*tokens, beta=beta.clamp(max=1e3), **options)

    return call


def larger_in_chunks(wrapped):
    def call(*tokens, form, scale, **options):
        return wrapped(*tokens, form=form, scale=scale * (1 + 1e-4 * (form == "chunk")), **options)

    return call


WRONG = [
    ("A4", "mamba2", late),
    ("A4", "momentum_delta_rule", lambda op: scaled("alpha", 0.99, op)),
    ("A5", "softmax_attention", lambda op: without("scale", op)),
    ("A5", "linear_attention", lambda op: without("scale", op)),
    ("A6", "momentum_delta_rule", lambda op: scaled("alpha", 0.0, op)),
    ("A8", "step", explicit),
    ("A9", "longhorn", capped),
    ("A9", "step", explicit),
    ("A10", "momentum_delta_rule", lambda op: scaled("eta", 0.5, op)),
    ("A12", "recursive_least_squares", lambda op: without("g", op)),
    ("B1", "delta_rule", lambda op: additive),
    ("B1", "linear_attention", lambda op: editing),
    ("B4", "delta_rule", larger_in_chunks),
    ("B7", "gated_delta_rule", lambda op: scaled("g", 0.5, op)),
    ("A4", "gla", lambda op: scaled("g", 0.99, op)),
    ("B7", "rwkv7", lambda op: scaled("a", 0.99, op)),
    ("B7", "gla", lambda op: scaled("g", 0.99, op)),
    ("B7", "step", lambda op: scaled("beta", 0.99, op)),
]


@pytest.mark.parametrize(("name", "op", "wrong"), WRONG)
def test_wrong_op_is_noticed(name, op, wrong, monkeypatch):
    monkeypatch.setattr(ops, op, wrong(getattr(ops, op)))
    experiment = experiments.load(name)
    with pytest.raises(AssertionError):
        experiment.check(experiment.run(Settings()))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SLOWEST])
def test_run_repeats_to_the_digit(name):
    stored, _ = first_run(name)
    assert json.dumps(experiments.load(name).run(Settings())) == stored


@pytest.mark.parametrize("name", NAMES)
def test_check_and_show_leave_the_result_alone(name):
    experiment, given = experiments.load(name), result(name)
    before = copy.deepcopy(given)
    experiment.check(given)
    experiment.tables(given)
    experiment.figures(given)
    assert given == before


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_whole(name):
    tables = experiments.load(name).tables(result(name))
    assert tables
    for table in tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.columns)}
        assert not any("nan" in str(cell).lower() for row in table.rows for cell in row)


@pytest.mark.parametrize("name", NAMES)
def test_figures_name_their_axes(name):
    for figure in experiments.load(name).figures(result(name)):
        panels = [Canvas().add_subplot() for _ in range(figure.panels)]
        figure.draw(*panels)
        assert all(axes.get_title() and axes.get_xlabel() and axes.get_ylabel() for axes in panels)


@pytest.mark.parametrize("name", NAMES)
def test_figures_become_pictures_of_the_page(name):
    for number, figure in enumerate(experiments.load(name).figures(result(name))):
        panels = drawing.draw(figure, f"{name}-{number}")
        assert len(panels) == figure.panels
        assert all(panel.inline.startswith("<svg") for panel in panels)


@pytest.mark.parametrize("name", NAMES)
def test_progress_ends_at_one(name):
    _, seen = first_run(name)
    assert list(seen) == sorted(seen)
    assert seen[-1] == pytest.approx(1.0)
