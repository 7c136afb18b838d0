"""The additive family with a scalar decay: linear attention, RetNet, Mamba-2."""

from __future__ import annotations

from torch import Tensor

from innerloop.algebra.chunks import stacked
from innerloop.algebra.decay import chunk_fades


def additive_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, states: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    r"""Read ``o_t = S_t^T q_t`` of ``S_t = e^{g_t} S_{t-1} + k_t v_t^T`` for all chunks, ``[B, G, M, C, .]``.

    .. math:: O = p \odot (Q S_0) + (P \circ Q K^\top) V, \qquad S_1 = p_C S_0 + (K \odot P_C)^\top V

    Returns:
        ``o``, ``[B, G, M, C, V]``, and the memory after the last chunk.
    """
    fade, carry = chunk_fades(g, q.dtype)
    starts, state = memories(k, v, fade, carry, states[0])
    scores, past = q @ k.mT, q @ starts
    if fade is None or carry is None:
        return scores.tril() @ v + past, (state,)
    return (fade * scores) @ v + carry * past, (state,)


def memories(k: Tensor, v: Tensor, fade: Tensor | None, carry: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the memory at the start of every chunk ``[B, G, M, K, V]``, and after the last."""
    keys = k if fade is None else fade[..., -1, :, None] * k
    writes = keys.mT @ v
    starts = []
    # Unbound, not sliced: the backward of a slice fills a whole gradient with zeros, for every chunk again.
    ends = [None] * writes.shape[2] if carry is None else carry[..., -1:, :].unbind(2)
    for write, end in zip(writes.unbind(2), ends, strict=True):
        starts.append(state)
        state = write + (state if end is None else end * state)
    return stacked(starts), state
