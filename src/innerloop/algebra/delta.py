"""The delta family with a scalar decay: DeltaNet, Gated DeltaNet, Longhorn."""

from __future__ import annotations

import torch
from torch import Tensor

from innerloop.algebra.chunks import stacked
from innerloop.algebra.decay import chunk_fades
from innerloop.algebra.solve import solve_unit_lower


def delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, states: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    r"""Read the memory that writes ``beta_t k_t (v_t - S^T k_t)^T`` into its faded self, for all chunks.

    .. math::
        (I + \beta P \circ \mathrm{stril}(K K^\top)) U = \beta (V - p \odot K S_0), \qquad
        O = p \odot (Q S_0) + (P \circ Q K^\top) U, \qquad S_1 = p_C S_0 + (K \odot P_C)^\top U

    The solve is by substitution: powers of the coupling reach 4.7e17 with 64 equal keys. It takes the residual of the
    carried memory for its right-hand side, so that no transition of the memory is ever formed.
    Yang et al. (2024), arXiv:2406.06484; with the decay Yang et al. (2025), arXiv:2412.06464; both transposed.

    Returns:
        ``o``, ``[B, G, M, C, V]``, and the memory after the last chunk.
    """
    (state,) = states
    beta = beta[..., None]
    fade, carry = chunk_fades(g, q.dtype)
    scores, coupling, keys, decayed = q @ k.mT, k @ k.mT, k, k
    if fade is None or carry is None:
        scores = scores.tril()
    else:
        scores, coupling = fade * scores, fade * coupling
        keys, decayed = fade[..., -1, :, None] * k, carry * k
    coupling, wanted = beta * coupling, beta * v
    decayed = beta * decayed
    updates, starts = [], []
    ends = [None] * q.shape[2] if carry is None else carry[..., -1:, :].unbind(2)
    chunks = zip(*(x.unbind(2) for x in (coupling, wanted, decayed, keys)), ends, strict=True)
    for pairs, value, read, key, end in chunks:
        starts.append(state)
        update = solve_unit_lower(pairs, value - read @ state)  # [B, G, C, V]
        updates.append(update)
        state = key.mT @ update + (state if end is None else end * state)
    past = q @ stacked(starts)
    return scores @ stacked(updates) + (past if carry is None else carry * past), (state,)


def proximal_delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, states: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run the delta family without decay at the rate of the implicit step."""
    return delta_chunks(q, k, v, None, proximal_rate(beta, k.square().sum(-1)), states)


def proximal_rate(beta: Tensor, square: Tensor) -> Tensor:
    """Return ``beta / (1 + beta |k|^2)``: ``1 / |k|^2`` at beta = inf, 0 for a zero key there; finite gradients."""
    large = beta > 1
    small_rate = beta.masked_fill(large, 0) / (1 + beta.masked_fill(large, 0) * square)
    below = 1 / beta.masked_fill(~large, 1) + square
    empty = below < torch.finfo(below.dtype).tiny  # |k|^2 is no number there: the key counts as zero
    large_rate = (1 / below.masked_fill(empty, 1)).masked_fill(empty, 0)
    return torch.where(large, large_rate, small_rate)
