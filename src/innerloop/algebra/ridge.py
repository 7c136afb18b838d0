"""Ridge regression over the past, read at every token: the exact end of the additive family."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from innerloop.algebra.additive import additive_chunks, memories
from innerloop.algebra.decay import chunk_fades
from innerloop.algebra.implicit import can_branch, implicit_solution


def ridge_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, states: tuple[Tensor, ...], ridge: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    r"""Read ``o_t = H_kv^T (H_kk + ridge I)^{-1} q_t`` with both moments fading alike, for all chunks.

    The solve is one map x_t of q_t; reading H_kv at x_t is linear attention with x for the query.

    Returns:
        ``o``, ``[B, G, M, C, V]``, and both moments after the last chunk.
    """
    covariance, cross = states
    covariance = (covariance + covariance.mT) / 2
    fade, carry = chunk_fades(g, q.dtype)
    solve = partial(_solve_all, ridge=ridge)
    x = implicit_solution(solve, solve, _product, q, k, g, covariance)
    out, (cross,) = additive_chunks(x, k, v, g, (cross,))
    return out, (memories(k, k, fade, carry, covariance)[1], cross)


def ridge_solve(covariance: Tensor, q: Tensor, ridge: float | Tensor) -> Tensor:
    """Return ``(covariance + diag ridge)^{-1} q`` by Cholesky, in float64: the condition is |covariance| / ridge.

    Rounding of what is carried can leave a moment without a root where the ridge is below its eps: there as much is
    added as rounding may have taken. A moment that has none even so (NaN, or no sum of k k^T) is NaN for its row alone.
    """
    eye = torch.eye(covariance.shape[-1], dtype=torch.float64, device=q.device)
    diagonal = ridge[..., None] if isinstance(ridge, Tensor) else ridge
    moments = covariance.double() + diagonal * eye
    factor, info = torch.linalg.cholesky_ex(moments)
    if not can_branch() or info.any():
        lost = (info > 0)[..., None, None]
        size = covariance.diagonal(dim1=-2, dim2=-1).abs().sum(-1)[..., None, None].double()
        mended = torch.where(lost, moments + 4 * torch.finfo(covariance.dtype).eps * size * eye, moments)
        failed = (torch.linalg.cholesky_ex(mended).info > 0)[..., None, None]
        factor = torch.linalg.cholesky_ex(torch.where(failed, eye, mended)).L
        q = q.masked_fill(failed[..., 0], torch.nan)
    return torch.cholesky_solve(q.double()[..., None], factor)[..., 0].to(q.dtype)


def each_covariance(k: Tensor, written: Tensor, g: Tensor | None, covariance: Tensor) -> Iterator[Tensor]:
    """Yield ``H_t = e^{g_t} H_{t-1} + written_t k_t^T`` of every token, ``[B, G, C, K, K]`` a chunk."""
    fade, carry = fades_or_ones(g, k)
    starts, _ = memories(written, k, fade, carry, covariance)
    for start, new, keys, past, between in zip(*(x.unbind(2) for x in (starts, written, k, carry, fade)), strict=True):
        pairs = (new[..., :, None] * keys[..., None, :]).flatten(-2)  # [B, G, C, KK]
        yield (between @ pairs).unflatten(-1, start.shape[-2:]) + past[..., None] * start[..., None, :, :]


def fades_or_ones(g: Tensor | None, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``chunk_fades``, or what stands for no decay."""
    fade, carry = chunk_fades(g, k.dtype)
    if fade is None or carry is None:
        ones = torch.ones(k.shape[-2], k.shape[-2], dtype=k.dtype, device=k.device).tril()
        return ones.expand(*k.shape[:-1], -1), torch.ones_like(k[..., :1])
    return fade, carry


def _solve_all(q: Tensor, k: Tensor, g: Tensor | None, covariance: Tensor, *, ridge: float) -> Tensor:
    """Return ``(H_t + ridge I)^{-1} q_t`` for every token, forming the H_t of one chunk after another."""
    moments = each_covariance(k, k, g, covariance)
    return torch.stack([ridge_solve(h, x, ridge) for h, x in zip(moments, q.unbind(2), strict=True)], 2)


def _product(x: Tensor, k: Tensor, g: Tensor | None, covariance: Tensor) -> Tensor:
    """Return ``H_t x_t`` for every token: linear attention, with no H_t formed."""
    return additive_chunks(x, k, k, g, (covariance,))[0]
