"""What the library says of itself: the stream of D1 holds, would notice a fault, and can be shown from its JSON."""

import functools
import json
import math

import pytest
import torch
from matplotlib.figure import Figure as Canvas

from innerloop import experiments, ops, states
from innerloop.experiments.experiment import Settings

D1 = experiments.load("D1")


@functools.cache
def quick_run():
    progress = []
    return json.dumps(D1.run(Settings(quick=True, progress=progress.append))), tuple(progress)


def result():
    return json.loads(quick_run()[0])


def test_the_quick_stream_holds_and_its_progress_ends_at_one():
    D1.check(result())
    assert quick_run()[1][-1] == pytest.approx(1.0)
    assert list(quick_run()[1]) == sorted(quick_run()[1])


@pytest.mark.slow
def test_a_million_tokens_hold():
    found = D1.run(Settings())
    assert found["curves"][0]["tokens"][-1] == 2**20
    D1.check(found)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e-7, 1e-4])
@pytest.mark.parametrize("curve", [0, 5, 17])
def test_check_fails_on_a_doctored_curve(curve, value):
    doctored = result()
    doctored["curves"][curve]["errors"][-1] = value
    with pytest.raises(AssertionError, match=r"errs by .* wanted"):
        D1.check(doctored)


def test_check_fails_on_an_error_that_rises_in_spite_of_decay():
    doctored = result()
    curve = next(x for x in doctored["curves"] if str(x["decay"]) == "0.9")
    curve["errors"][:] = [1e-8 * 2**n for n in range(len(curve["errors"]))]
    with pytest.raises(AssertionError, match=r"at decay 0.9 .* errs"):
        D1.check(doctored)


def test_check_fails_where_a_curve_is_missing():
    doctored = result()
    doctored["curves"].pop()
    with pytest.raises(AssertionError, match="not all 18"):
        D1.check(doctored)


def narrow(rule, *tokens, initial_state=None, **options):
    """Carry the state in bfloat16."""
    o, state = RUN(rule, *tokens, initial_state=initial_state, **options)
    return o, state if state is None or options["q"].dtype == torch.float64 else states.to(states.to(
        state, dtype=torch.bfloat16), dtype=torch.float32)  # fmt: skip


def forgetful(rule, *tokens, initial_state=None, **options):
    """Lose a little of the state at the seam, in one precision only."""
    if initial_state is not None and options["q"].dtype != torch.float64:
        initial_state = states.clone(initial_state)
        for x in initial_state if isinstance(initial_state, tuple) else (initial_state,):
            x *= 1 - 1e-3
    return RUN(rule, *tokens, initial_state=initial_state, **options)


RUN = ops.run


@pytest.mark.parametrize("wrong", [narrow, forgetful])
def test_a_wrong_stream_is_noticed(wrong, monkeypatch):
    monkeypatch.setattr(ops, "run", wrong)
    monkeypatch.setattr("innerloop.experiments.d01_streaming.QUICK", 2**12)
    with pytest.raises(AssertionError, match="errs by"):
        D1.check(D1.run(Settings(quick=True)))


def test_it_can_be_shown():
    (table,) = D1.tables(result())
    assert len(table.rows) == 9
    assert {len(row) for row in table.rows} == {len(table.columns)}
    (figure,) = D1.figures(result())
    panels = [Canvas().add_subplot() for _ in range(figure.panels)]
    figure.draw(*panels)
    assert all(axes.get_title() and axes.get_xlabel() and axes.get_ylabel() for axes in panels)
