"""Attention over rows that keep different numbers of pairs, as a packed call leaves them."""

import pytest
import torch

from innerloop import ops
from innerloop.algebra import attention
from innerloop.testing import assert_close, draw_call

DOUBLE = torch.float64
LENGTHS = (2, 7, 1, 4)


@pytest.fixture
def past():
    """Return a state of rows of different lengths with junk in the padding, and the same rows one by one."""
    call = draw_call("softmax_attention", B=1, T=sum(LENGTHS), seed=3)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    _, state = call.run(cu_seqlens=bounds)
    beyond = torch.arange(state.keys.shape[1]) >= state.lengths[:, None]
    junk = ops.AttentionState(
        *(x.masked_fill(beyond[..., None, None], torch.nan) for x in (state.keys, state.values)), state.lengths
    )
    alone = [call.tokens(a, b).run()[1] for a, b in zip(bounds.tolist(), bounds.tolist()[1:], strict=False)]
    return junk, alone


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_rows_of_different_lengths_go_on_as_if_alone(past, form):
    state, alone = past
    call = draw_call("softmax_attention", B=4, T=5, K=5)  # as many tokens as the keys are wide
    call.state = state
    call = call.tracked()
    o, after = call.run(form=form)
    assert after.lengths.tolist() == [n + 5 for n in LENGTHS]
    for row, before in enumerate(alone):
        one = call.map(lambda _, x, row=row: x[row : row + 1])
        one.state = before
        want, end = one.run(form="recurrent")
        assert_close(o[row : row + 1], want, DOUBLE, what=f"row {row}")
        kept = end.lengths.item()
        assert_close(after.keys[row : row + 1, :kept], end.keys[:, :kept], DOUBLE, what=f"keys of row {row}")
        assert_close(after.values[row : row + 1, :kept], end.values[:, :kept], DOUBLE, what=f"values of row {row}")
    slopes = torch.autograd.grad(o.sum(), [call.q, call.k, call.v])
    assert all(x.isfinite().all() for x in slopes)


def test_rows_of_different_lengths_take_a_step_as_if_alone(past):
    state, alone = past
    call = draw_call("softmax_attention", B=4, T=1)
    q, k, v = (x[:, 0] for x in (call.q, call.k, call.v))
    o, _ = ops.step("softmax_attention", q, k, v, state=state)
    for row, before in enumerate(alone):
        one = slice(row, row + 1)
        want, _ = ops.step("softmax_attention", q[one], k[one], v[one], state=before)
        assert_close(o[one], want, DOUBLE, what=f"row {row}")


def test_blocks_of_queries_see_their_own_past(monkeypatch):
    call = draw_call("softmax_attention", T=37, state=True)
    want, _ = call.run(form="recurrent")
    for size in (1, 5, 36, 37):
        monkeypatch.setattr(attention, "QUERIES", size)
        assert_close(call.run(form="chunk")[0], want, DOUBLE, what=f"blocks of {size}")


@pytest.mark.parametrize("width", [3, 5])
def test_keys_as_wide_as_the_tokens_or_the_memory_are_many_change_nothing(width):
    call = draw_call("softmax_attention", T=3, K=width)
    _, call.state = draw_call("softmax_attention", T=2, K=width, seed=1).run()
    assert_close(call.run(form="chunk")[0], call.run(form="recurrent")[0], DOUBLE)


def test_packed_sequences_as_long_as_there_are_heads_are_padded():
    call = draw_call("softmax_attention", B=1, T=3, H=2, G=2)
    o, state = call.run(cu_seqlens=torch.tensor([0, 2, 3]))
    assert state.lengths.tolist() == [2, 1]
    want, after = call.tokens(2, 3).run()
    assert_close(o[:, 2:], want, DOUBLE)
    assert_close(state.keys[1:, :1], after.keys, DOUBLE)
