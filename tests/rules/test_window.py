"""Attention that looks back on a window."""

import itertools

import pytest
import torch

from innerloop import ops
from innerloop.testing import error

HEADS = {"q": 4, "k": 2, "v": 2}


def drawn(rows, length, **options):
    generator = torch.Generator().manual_seed(length)
    widths = {"q": 6, "k": 6, "v": 3}
    return [
        torch.randn(rows, length, heads, widths[name], generator=generator, dtype=torch.float64, **options)
        for name, heads in HEADS.items()
    ]


def band(q, k, v, window):
    """Return attention by its definition, over the tokens from t - window + 1 to t."""
    k, v = (x.repeat_interleave(2, 2) for x in (k, v))
    t, s = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    scores = torch.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill((s > t) | (s <= t - window), -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshv->bthv", weights, v)


# On both sides of a block's 64 queries, and of a window's own length.
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_a_window_is_a_band_of_the_scores(form):
    lengths = (1, 2, 63, 64, 65, 130) if form == "chunk" else (1, 40)
    for window in (1, 2, 5, 64, 65, 100, 500):
        for length in lengths:
            q, k, v = drawn(2, length)
            o, state = ops.softmax_attention(q, k, v, window=window, form=form, output_final_state=True)
            assert error(o, band(q, k, v, window)) <= 1e-12
            assert state.keys.shape[1] == length


def test_pieces_go_on_within_the_window():
    for window in (1, 3, 64, 90):
        q, k, v = drawn(2, 150)
        want = band(q, k, v, window)
        for cuts in ((1,), (64, 65), (149,), (3, 3, 80)):
            state, parts = None, []
            for pieces in zip(*(x.tensor_split(cuts, 1) for x in (q, k, v)), strict=True):
                o, state = ops.softmax_attention(*pieces, window=window, initial_state=state, output_final_state=True)
                parts.append(o)
            assert error(torch.cat(parts, 1), want) <= 1e-12
        last = [x[:, -1] for x in (q, k, v)]
        _, state = ops.softmax_attention(*(x[:, :-1] for x in (q, k, v)), output_final_state=True)
        assert error(ops.step("softmax_attention", *last, state=state, window=window)[0], want[:, -1]) <= 1e-12


def test_a_window_holds_in_every_row_and_sequence():
    q, k, v = drawn(1, 140)
    bounds = [0, 3, 70, 70, 140]
    packing = torch.tensor(bounds)
    o, state = ops.softmax_attention(q, k, v, window=5, cu_seqlens=packing, output_final_state=True)
    again, _ = ops.softmax_attention(q, k, v, window=5, cu_seqlens=packing, initial_state=state)
    for first, last in itertools.pairwise(bounds):
        piece = [x[:, first:last] for x in (q, k, v)]
        assert error(o[:, first:last], band(*piece, 5)) <= 1e-12
        twice = band(*(torch.cat((x, x), 1) for x in piece), 5)[:, last - first :]
        assert error(again[:, first:last], twice) <= 1e-12  # rows whose pasts differ in length


def test_a_window_has_both_derivatives():
    inputs = [x.requires_grad_() for x in drawn(1, 5)]

    def run(q, k, v):
        first, state = ops.softmax_attention(q[:, :2], k[:, :2], v[:, :2], window=3, output_final_state=True)
        second, _ = ops.softmax_attention(q[:, 2:], k[:, 2:], v[:, 2:], window=3, initial_state=state)
        return torch.cat((first, second), 1)

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)
    long = [x.requires_grad_() for x in drawn(1, 140)]
    slopes = [torch.autograd.grad(f(*long).square().sum(), long) for f in (lambda *x: band(*x, 70), near)]
    for got, want in zip(*reversed(slopes), strict=True):
        assert error(got, want) <= 1e-11


def near(q, k, v):
    return ops.softmax_attention(q, k, v, window=70)[0]


def test_a_wide_window_is_no_window():
    q, k, v = drawn(2, 70)
    assert error(ops.softmax_attention(q, k, v, window=70)[0], ops.softmax_attention(q, k, v)[0]) <= 1e-12
    for window, form in ((140, "chunk"), (10**20, "chunk"), (10**20, "recurrent")):
        o, state = ops.softmax_attention(q, k, v, window=window, form=form, output_final_state=True)
        assert error(o, ops.softmax_attention(q, k, v)[0]) <= 1e-12
        again = ops.softmax_attention(q, k, v, window=window, form=form, initial_state=state)[0]
        assert error(again, ops.softmax_attention(q, k, v, initial_state=state)[0]) <= 1e-12
    for window, kind in ((-1, ValueError), (2.5, ValueError), ("3", TypeError), (float("nan"), ValueError)):
        with pytest.raises(kind, match="window must be"):
            ops.softmax_attention(q, k, v, window=window)
