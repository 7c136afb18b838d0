"""B2, B8, B10 to B13, D2 and C4's inside: every part runs, and each check would notice what is wrong."""

import functools
import json
import math

import pytest
import torch
from matplotlib.figure import Figure as Canvas

from innerloop import experiments, ops
from innerloop.data.tasks import OverwriteRecall, WordProblem
from innerloop.experiments import b02_trained_overwriting as b02
from innerloop.experiments import b08_trained_parity as b08
from innerloop.experiments import b10_tracked_parity as b10
from innerloop.experiments import b11_two_reflections as b11
from innerloop.experiments import b12_ceiling as b12
from innerloop.experiments import b13_exercises as b13
from innerloop.experiments import d02_recall_by_state as d02
from innerloop.experiments.blocks import overwriting
from innerloop.experiments.experiment import Settings
from innerloop.probe import Budget, Row
from innerloop.report import drawing

NAMES = ("B2", "B8", "B10", "B11", "B12", "B13", "D2")


def row(layer, seed, last, **changed):
    return {"layer": layer, "seed": seed, "scores": last, "last": last, "parameters": 1, "state_bytes": 8, "steps": 3,
            "seconds": 1.0, "losses": [1.0], **changed}  # fmt: skip


@functools.cache
def exercises():
    """B13 without its trainings."""
    result = b13.run(Settings(part=lambda name, make: {"recall": 1.0}))
    return json.dumps(result)


@functools.cache
def reflections():
    return json.dumps(b11.run(Settings()))


def held(name):
    """Return a full result in which all is well."""
    return json.loads(_held(name))


@functools.cache
def _held(name):
    return json.dumps(_made(name))


def _made(name):
    factors = {"1": 1.0, "2": 1.0, "4": 1.0, "8": 1.0, "16": 1.0}
    coin = dict.fromkeys(factors, 0.5)
    if name == "B2":
        share = {"hebbian": {1: 1.0, 2: 0.53, 4: 0.33, 6: 0.27}, "delta": dict.fromkeys(b02.REPEATS, 1.0)}
        rows = [{"write": w, "repeats": R, "seed": s, "recall": share[w][R]} for s in b02.SEEDS for R in b02.REPEATS
                for w in b02.WRITES]  # fmt: skip
        return {"rows": rows, "epochs": 12, "repeats": list(b02.REPEATS)}
    if name == "B8":
        low, high = [0.5, 0.5, 0.65], [1.0, 1.0, 1.0]
        found = {"sigmoid": {"8": low, "16": low, "24": low}, "tanh": {"8": high, "16": high, "24": [0.5, 0.5, 1.0]}}
        return {"accuracy": found, "lengths": list(b08.LENGTHS)}
    if name == "B10":
        doubled, single = b10.LAYERS
        kinds = ((doubled, factors), (single, coin), ("gla", coin))
        rows = [row(layer, seed, last) for layer, last in kinds for seed in (0, 1)]
        return {"rows": rows, "steps": 600}
    if name == "B11":
        return json.loads(reflections())
    if name == "B12":
        last = {"RNN": 1.0, "mamba2(taps=0)": 0.02, "normalized_linear_attention": 0.02}
        rows = {
            name: {task: row(name, 0, {"1": last.get(name, 1.0), "2": 0.1, "4": 0.1}) for task in b12.TASKS}
            for name in (rung.layer for rung in b12.LADDER)
        }
        spectra = {rung.transition: b12.spectrum(rung) for rung in b12.LADDER if rung.rule}
        return {"spectra": spectra, "rows": rows, "chance": {"parity": 0.5, "S3": 0.17, "S5": 0.01}}
    if name == "B13":
        return json.loads(exercises())
    share = {2: 0.3, 4: 0.6, 8: 0.9, 16: 1.0, 0: 1.0}
    wanted = [(rule, width) for rule in d02.RULES for width in d02.WIDTHS] + [(d02.CEILING, 0)]
    rows = [
        row(rule, seed, {"1": share[width]}, rule=rule, memory=8 * width * width)
        for rule, width in wanted
        for seed in (0, 1)
    ]
    return {"rows": rows, "steps": d02.BUDGET.steps, "rules": list(d02.RULES), "widths": list(d02.WIDTHS)}


@pytest.mark.parametrize("name", NAMES)
def test_the_check_passes_what_holds_and_all_of_it_is_drawn(name):
    experiment, result = experiments.load(name), held(name)
    experiment.check(result)
    for table in experiment.tables(result):
        assert table.rows and all(len(line) == len(table.columns) for line in table.rows)
    for number, figure in enumerate(experiment.figures(result)):
        assert all("<svg" in panel.inline for panel in drawing.draw(figure, f"x{number}"))
        canvas = Canvas()
        figure.draw(*canvas.subplots(1, figure.panels, squeeze=False)[0])


DOCTORED = [
    ("B2", ("rows", 1, "recall"), 0.94),
    ("B2", ("rows", 2, "recall"), 0.63),
    ("B2", ("rows", 6, "recall"), 0.51),
    ("B8", ("accuracy", "sigmoid", "16", 2), 0.76),
    ("B8", ("accuracy", "tanh", "8", 0), 0.99),
    ("B8", ("accuracy", "tanh", "24"), [0.5, 0.5, 0.9]),
    ("B8", ("lengths",), [8, 16]),
    ("B10", ("rows", 1, "last", "4"), 0.89),
    ("B10", ("rows", 2, "last", "4"), 0.56),
    ("B10", ("rows", 3, "last", "4"), 0.44),
    ("B11", ("rank", 0), 1),
    ("B11", ("realised", "1"), [True] * 5 + [False]),
    ("B11", ("realised", "2", 3), False),
    ("B11", ("words", "4096", "two"), 0.98),
    ("B11", ("words", "64", "chunked"), 0.9),
    ("B11", ("words", "16", "one"), 0.6),
    ("B11", ("words", "4096", "off"), 0.1),
    ("B12", ("spectra", "I", "low"), 0.9),
    ("B12", ("spectra", "product of n = 2 Householders", "turn"), 0.0),
    ("B12", ("rows", "RNN", "S5", "last", "1"), 0.989),
    ("B12", ("rows", "mamba2(taps=0)", "S5", "last", "1"), 0.2),
    ("B12", ("rows", "delta_product(taps=0,forget_gate=false)", "S3", "last", "1"), 0.5),
    ("B12", ("rows", "delta_rule(taps=0,allow_neg_eigval=true)", "parity", "last", "1"), 0.5),
    ("B13", ("doubled", "doubled"), 0.9),
    ("B13", ("neighbours", "off"), 1e-6),
    ("B13", ("capacity", "linear_attention", 4), 0.7),
    ("B13", ("capacity", "delta_rule", 3), 0.001),
    ("B13", ("capacity", "recursive_least_squares", 0), 0.01),
    ("B13", ("substitution",), 1e-9),
    ("B13", ("gated", "gradient"), 1e-6),
    ("D2", ("rows", 0, "scores", "1"), 2.0),
    ("D2", ("rows", -1, "scores", "1"), 0.5),
]


@pytest.mark.parametrize(("name", "path", "value"), DOCTORED)
def test_check_fails_on_a_doctored_result(name, path, value):
    doctored = held(name)
    *way, last = path
    functools.reduce(lambda inner, key: inner[key], way, doctored)[last] = value
    with pytest.raises(AssertionError, match=r"\d"):
        experiments.load(name).check(doctored)


def with_every_number(value, number):
    if isinstance(value, dict):
        return {key: with_every_number(inner, number) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_every_number(inner, number) for inner in value]
    return number if isinstance(value, int | float) else value


@pytest.mark.parametrize("name", NAMES)
def test_check_fails_where_nothing_is_a_number(name):
    with pytest.raises(AssertionError):
        experiments.load(name).check(with_every_number(held(name), math.nan))


def test_the_lists_of_the_document_ask_for_the_latest_value():
    lists = overwriting.draw(20, 3, seed=1)
    made = OverwriteRecall(keys=overwriting.KEYS, values=overwriting.VALUES, writes=3)
    assert lists.keys.shape == (20, made.length)
    for keys, contents, answers in zip(*(x.tolist() for x in lists), strict=True):
        book = {}
        for key, content in zip(keys[:24], contents[:24], strict=True):
            book[key] = content
        assert [book[key] for key in keys[24:]] == answers and set(contents[24:]) == {overwriting.VALUES}


@pytest.mark.parametrize(("write", "op"), [("hebbian", "linear_attention"), ("delta", "delta_rule")])
def test_a_memory_model_addresses_by_the_key_alone(write, op, monkeypatch):
    torch.manual_seed(0)
    model, seen, real = overwriting.MemoryModel(write), [], getattr(ops, op)

    def kept(q, k, v, **options):
        seen.append((q, k, options.get("beta", q), v))
        return real(q, k, v, **options)

    monkeypatch.setattr(ops, op, kept)
    lists = overwriting.draw(2, 1, seed=1)
    keys = (lists.keys + 1) % overwriting.KEYS
    for k, content in ((lists.keys, lists.contents), (lists.keys, lists.contents.flip(1)), (keys, lists.contents)):
        model(k, content)
    base, other_contents, other_keys = seen
    assert all(torch.equal(a, b) for a, b in zip(base[:3], other_contents[:3], strict=True))
    assert not torch.equal(base[3], other_contents[3]) and torch.equal(base[3], other_keys[3])
    assert not torch.equal(base[1], other_keys[1])


def test_trainings_are_their_seeds(monkeypatch):
    monkeypatch.setattr(overwriting, "TRAINING", 64)
    monkeypatch.setattr(overwriting, "HELD_OUT", 32)
    progress = []
    first = overwriting.trained_recall("delta", 1, 1, 3, progress.append)
    assert first == overwriting.trained_recall("delta", 1, 1, 3) and progress == [1.0]
    monkeypatch.setattr(b08, "TRAINING", 64)
    monkeypatch.setattr(b08, "HELD_OUT", 32)
    monkeypatch.setattr(b08, "EPOCHS", 2)
    assert b08.trained_parity("tanh", 4, 0, progress.append) == b08.trained_parity("tanh", 4, 0, progress.append)


def test_a_multiplicative_rnn_is_a_product_of_its_factors():
    torch.manual_seed(0)
    model = b08.MultiplicativeRNN(torch.tanh)
    bits = torch.randint(2, (3, 5))
    h = model.start.expand(3, -1)
    for t in range(5):
        h = torch.tanh(model.to_a(model.embedding(bits[:, t]))) * h
    torch.testing.assert_close(model(bits), model.head(h))


@pytest.mark.parametrize("name", ["B2", "B8", "B10", "B12", "D2"])
@pytest.mark.parametrize("quick", [False, True])
def test_every_training_is_a_part_that_is_kept(name, quick, monkeypatch):
    """Parts are found under names of their own, so that an interrupted run goes on."""
    asked, spoken = [], []

    def part(key, make):
        assert key not in asked
        asked.append(key)
        last = {str(f): 1.0 for f in (1, 2, 4, 8, 16)}
        return {"recall": 1.0} if name == "B2" else {"accuracy": 1.0} if name == "B8" else row("x", 0, last)

    experiment = experiments.load(name)
    result = experiment.run(Settings(quick=quick, part=part, progress=spoken.append))
    assert asked and json.loads(json.dumps(result))
    assert quick is False or len(asked) <= 6


def test_rungs_train_on_words_that_grow(monkeypatch):
    seen = []

    def trial(chosen, task, budget, seed, *, factors, stages, progress):
        seen.append((chosen.name, task, budget, stages))
        return Row("x", 0, {}, {}, 1, 1, 1, 1.0, [])

    monkeypatch.setattr(b12, "trial", trial)
    for name, task in (("RNN", "S5"), ("RNN", "parity"), ("mamba2(taps=0)", "S5")):
        b12.row(name, task, print)
    assert [len(stages) for *_, stages in seen] == [10, 0, 10]
    assert seen[0][3][0] == WordProblem(group="S5", letters=2) and seen[0][1] == WordProblem(group="S5", letters=12)
    model = torch.nn.Sequential(*b12.layer_of("RNN", Budget(width=8)).make())
    assert model(torch.randn(2, 3, 8))[0].shape == (2, 3, 8)


def test_a_wrong_op_is_noticed(monkeypatch):
    real = ops.delta_product

    def late(*tokens, beta, **options):
        return real(*tokens, beta=beta.flip(2).contiguous() if beta.shape[2] > 1 else beta, **options)

    monkeypatch.setattr(ops, "delta_product", late)
    monkeypatch.setattr(b11, "WORDS", {16: 50})
    with pytest.raises(AssertionError):
        b11.check(b11.run(Settings()))
