"""C6: every variant trains a step, and the check would notice a layer that does not recall."""

import copy

import pytest
import torch

from innerloop import experiments
from innerloop.experiments import c06_beyond as c06
from innerloop.experiments.blocks.hope_layer import answered, train_layer

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
    assert progress == [0.5, 1.0]
    assert all(torch.tensor(losses).isfinite())
    assert 0 <= answered(block, 4) <= 1
    again, _ = train_layer(1, 2, options, progress.append)
    for p, q in zip(block.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_check_passes_what_holds_and_shows_it():
    C6.check(held())
    assert len(C6.tables(held())[0].rows) == 8


@pytest.mark.parametrize(("row", "place", "share"), [(0, 0, 0.98), (1, 1, 0.97), (2, 2, 0.9), (4, 2, 0.1), (7, 0, 0.1)])
def test_the_check_notices_a_layer_that_forgets(row, place, share):
    doctored = copy.deepcopy(held())
    doctored["rows"][row]["accuracy"][place] = share
    with pytest.raises(AssertionError, match=r"answers .* wanted"):
        C6.check(doctored)


def test_the_check_notices_a_layer_that_is_missing():
    with pytest.raises(AssertionError, match="was not trained"):
        C6.check({"rows": held()["rows"][3:]})
