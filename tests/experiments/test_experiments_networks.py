"""C5, C6, D3 and D4: every variant trains a step, and the checks would notice a layer that does not recall."""

import copy
import functools
import json

import pytest
import torch
from matplotlib.figure import Figure as Canvas

from innerloop import experiments
from innerloop.experiments import c05_tinkerings as c05
from innerloop.experiments import c06_beyond as c06
from innerloop.experiments import d03_titans_ablation as d03
from innerloop.experiments import d04_new_recipes as d04
from innerloop.experiments.blocks.hope_layer import answered, train_layer
from innerloop.experiments.experiment import Settings

C6 = experiments.load("C6")


def held():
    """Return a result in which all is well."""
    rows = [(c06.LAYER, seed, [1.0, 0.99, 0.98]) for seed in c06.SEEDS]
    rows += [(name, 1, [0.9, 0.6, 0.4]) for name in c06.SIDE] + [(c06.BLOCK, 1, [1.0, 1.0, 1.0])]
    found = [
        {"name": n, "seed": s, "steps": 9, "loss": [2.5, 1.0], "pairs": list(c06.LENGTHS), "accuracy": a}
        for n, s, a in rows
    ]
    many = {"name": c06.MANY, "seed": 1, "steps": 9, "loss": [2.5], "pairs": [c06.MANY_PAIRS], "accuracy": [0.9]}
    return {"rows": [*found, many]}


@pytest.mark.parametrize("options", [{"periods": ()}, *c06.SIDE.values()])
def test_every_variant_trains(options):
    progress = []
    block, losses = train_layer(1, 2, options, progress.append)
    assert len(losses) == 2
    assert len(block.hope.key()) == (2 if "mlp" in options.values() else 1)
    assert (block.hope.levels is None) == (not options.get("periods", (1,)))
    assert progress == [0.5, 1.0]
    assert all(torch.tensor(losses).isfinite())
    assert 0 <= answered(block, 4) <= 1
    again, _ = train_layer(1, 2, options, progress.append)
    for p, q in zip(block.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_check_passes_what_holds_and_shows_it():
    C6.check(held())
    assert len(C6.tables(held())[0].rows) == 9


@pytest.mark.parametrize(("row", "place", "share"), [(0, 0, 0.98), (1, 1, 0.97), (2, 2, 0.9), (4, 2, 0.1), (8, 0, 0.1)])
def test_the_check_notices_a_layer_that_forgets(row, place, share):
    doctored = copy.deepcopy(held())
    doctored["rows"][row]["accuracy"][place] = share
    with pytest.raises(AssertionError, match=r"answers .* wanted"):
        C6.check(doctored)


def test_the_check_notices_a_layer_that_is_missing():
    with pytest.raises(AssertionError, match="was not trained"):
        C6.check({"rows": held()["rows"][3:]})


def fine(name):
    """Return a result of a full run in which all is well."""
    if name == "C5":
        return {
            "filled": {"4": 1.0, "8": 0.8, "16": 0.3, "32": 0.1},
            "changed": dict(zip(c05.CHANGES, (0.3, 1.0), strict=True)),
            "gates": {"tokens": ["k1", "v2", "k1"], "rate": [0.1, 0.9, 0.5], "keep": [0.9, 0.8, 0.9]},
        }
    if name == "D3":
        rows = [
            {"name": part, "seed": seed, "loss": [2.7] + [0.3] * 9, "accuracy": [0.97, 0.95, 0.9]}
            for part in d03.PARTS
            for seed in d03.SEEDS[:1]
        ]
        for row in rows:
            row["accuracy"] = [0.4] * 3 if row["name"] == "no convolution" else row["accuracy"]
        return {"steps": d03.STEPS, "rows": rows}
    rows = [{"name": n, "steps": s, "loss": [2.5, 0.1], "accuracy": 0.95} for n, s in d04.STEPS.items()]
    return {"rows": rows}


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("C5", ("filled", "4"), 0.9),
        ("C5", ("filled", "16"), 0.9),
        ("C5", ("filled",), {"4": 1.0, "8": 0.8}),
        ("C5", ("changed", "no convolution"), 0.9),
        ("C5", ("changed", "the raw value as target"), 0.5),
        ("C5", ("gates", "rate"), [0.5, 0.5, 0.5]),
        ("D3", ("rows", 0, "accuracy"), [0.9, 0.45, 0.4]),
        ("D3", ("rows", 0, "loss"), [2.7] * 10),
        ("D3", ("rows",), []),
        ("D3", ("rows", -1, "name"), d03.FULL),
        ("D4", ("rows", 1, "accuracy"), 0.8),
        ("D4", ("rows",), []),
        ("D4", ("rows", 0), {"name": next(iter(d04.STEPS)), "steps": d04.QUICK_STEPS, "loss": [1.0], "accuracy": 0.1}),
    ],
)
def test_the_checks_notice_what_does_not_hold(name, path, value):
    result = fine(name)
    experiments.load(name).check(json.loads(json.dumps(result)))
    *way, last = path
    functools.reduce(lambda inner, key: inner[key], way, result)[last] = value
    with pytest.raises(AssertionError, match=r"\d"):
        experiments.load(name).check(result)


@pytest.mark.parametrize("name", ["C5", "D3", "D4"])
def test_short_runs_report_progress_and_are_shown(name, monkeypatch):
    for module, options in (
        (c05, {"STEPS": 2, "BLOCK_STEPS": 3}), (d03, {"QUICK_STEPS": 2}), (d04, {"QUICK_STEPS": 2}),
    ):  # fmt: skip
        for option, value in options.items():
            monkeypatch.setattr(module, option, value)
    seen, experiment = [], experiments.load(name)
    result = json.loads(json.dumps(experiment.run(Settings(quick=True, progress=seen.append))))
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(1.0)
    with pytest.raises(AssertionError):
        experiment.check(result)
    for table in experiment.tables(result):
        assert {len(row) for row in table.rows} == {len(table.columns)}
    for figure in experiment.figures(result):
        panels = [Canvas().add_subplot() for _ in range(figure.panels)]
        figure.draw(*panels)
        assert all(axes.get_title() and axes.get_xlabel() for axes in panels)


def test_lists_ask_for_the_value_that_was_written_last():
    sequence, answer = d03.draw(20, 3, torch.Generator().manual_seed(0))
    for tokens, right in zip(sequence.tolist(), answer.tolist(), strict=True):
        *listed, asked = tokens
        pairs = list(zip(listed[::2], listed[1::2], strict=True))
        assert sorted(key for key, _ in pairs) == sorted(3 * list({key for key, _ in pairs}))
        assert dict(pairs)[asked] == d03.KEYS + right


def test_without_forgetting_nothing_is_forgotten_and_training_leaves_it_so():
    layer = d03.build("no forgetting").layer
    x = torch.randn(2, 5, d03.WIDTH)
    assert not layer.gates(x)["alpha"].any()
    y, _ = layer(x)
    y.sum().backward()
    assert all(p.grad is None for p in layer.gates.alpha.parameters())
    assert layer.gates.theta.weight.grad.isfinite().all()
