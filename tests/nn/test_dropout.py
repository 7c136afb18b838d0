"""Dropout does what its name says, at every place alike."""

from __future__ import annotations

import pytest
import torch

from innerloop.nn.dropout import Dropout


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chance", [0.1, 0.3, 0.9])
def test_numbers_are_dropped_or_scaled_at_the_chance(chance: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.full((64, 1001), 2.0, dtype=dtype, requires_grad=True)
    y = Dropout(chance)(x)
    y.sum().backward()
    assert x.grad is not None and torch.equal(2 * x.grad, y)
    kept = y != 0
    scale = torch.tensor(1 / (1 - round(chance * 65536) / 65536), dtype=dtype)
    assert y[kept].unique().tolist() == [2 * scale.item()]
    # Five deviations: over all places, and over those that share a place in the numbers drawn.
    for part in (kept.flatten(), *(kept.flatten()[i::4] for i in range(4))):
        assert abs(part.double().mean().item() - 1 + chance) < 5 * (chance * (1 - chance) / len(part)) ** 0.5
    flat = kept.flatten().double() - kept.double().mean()
    for apart in (1, 2, 3, 4, 1001):  # neighbours know nothing of each other
        found = (flat[apart:] * flat[:-apart]).mean().item() / flat.square().mean().item()
        assert abs(found) < 5 / len(flat) ** 0.5


def test_a_seed_names_what_is_dropped() -> None:
    x, layer = torch.ones(7, 9), Dropout(0.5)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(layer(x))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_nothing_is_dropped_in_evaluation_or_at_chance_0_and_all_at_1() -> None:
    x = torch.randn(5, 3)
    assert torch.equal(Dropout(0.4).eval()(x), x) and torch.equal(Dropout(0.0)(x), x)
    assert torch.equal(Dropout(1.0)(x), torch.zeros(5, 3)) and Dropout(0.4)(x[:0]).shape == (0, 3)


def test_it_can_be_transformed() -> None:
    y = torch.func.vmap(Dropout(0.5), randomness="different")(torch.ones(4, 50))
    assert set(y.unique().tolist()) == {0.0, 2.0}
