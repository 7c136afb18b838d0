"""Calls written down once and run for one token after another."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from innerloop.kernels.native.series import MOST, Series, present

pytestmark = pytest.mark.skipif(not present(), reason="there are no native kernels here")


@pytest.mark.parametrize("width", [1, 7, 16, 33, 129])
@pytest.mark.parametrize("rows", range(1, MOST + 1))
def test_linear_maps_are_those_of_float64(rows: int, width: int) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(height, width) for height in (1, 31, 32, 33, 70)]
    series = Series(rows)
    x, total = series.room(width), series.room(31)
    found = series.linear(x, weights)
    series.linear(x, [weights[1]], add_to=total)
    for _ in range(2):
        x.normal_()
        before = total.normal_().double()
        series.run()
        for got, weight in zip(found, weights, strict=True):
            torch.testing.assert_close(got.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(total.double(), before + x.double() @ weights[1].double().T, rtol=1e-5, atol=1e-5)


def test_a_row_does_not_depend_on_the_others_nor_on_threads() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(3000, 300), torch.randn(3, 300)
    found = []
    for rows, threads in ((1, 1), (1, 2), (3, 2)):
        series = Series(rows)
        room = series.room(300)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        (out,) = series.linear(room, [weight])
        torch.set_num_threads(before)
        room.copy_(x[:rows])
        series.run()
        found.append(out[0])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_nothing_beside_a_map_is_read_or_written() -> None:
    around = torch.full((5, 9 * 11), math.nan)
    weight = around[2].view(9, 11).fill_(1.0)
    room = torch.full((3, 11), math.nan)
    room[1] = 1.0
    series = Series(1)
    (out,) = series.linear(room[1:2], [weight])
    series.run()
    assert torch.equal(out, torch.full((1, 9), 11.0))
    assert around[[0, 1, 3, 4]].isnan().all() and room[[0, 2]].isnan().all()


EDGES = [0.0, -0.0, 7.25, 1e-30, -1e-3, 0.5, -20.0, 20.5, 88.0, -88.0, 300.0, -300.0, 1e30, -1e30, math.inf]


def test_gates_are_those_of_float64() -> None:
    x = torch.tensor([EDGES, [-e for e in EDGES[:-1]] + [3.0]])
    series = Series(2)
    given, other = series.room(len(EDGES)), series.room(len(EDGES))
    offset, rate = torch.linspace(-3, 3, len(EDGES)), torch.linspace(-4, 3, len(EDGES))
    found = (series.silu(given, other), series.silu(given), series.sigmoid(given, 2.0))
    found += (series.decay(given, offset, rate),)
    given.copy_(x)
    other.copy_(torch.randn(2, len(EDGES)))
    series.run()
    wide = x.double()
    wanted = (
        F.silu(wide) * other.double(),
        F.silu(wide),
        2 * torch.sigmoid(wide),
        -rate.double().exp() * F.softplus((x + offset).double(), threshold=1e9),
    )
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=1e-30)
