"""Ridge regression over the past, read at every token: the exact end of the additive family."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from innerloop.algebra.additive import additive_chunks, memories
from innerloop.algebra.decay import chunk_fades


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
    # Under torch.func and in forward mode no custom Function may run here; there all H_t are kept.
    open_ = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    whiten = solve_all if open_ else _Whitened.apply
    x = whiten(q, k, g, covariance, ridge)
    out, (cross,) = additive_chunks(x, k, v, g, (cross,))
    return out, (memories(k, k, fade, carry, covariance)[1], cross)


def ridge_solve(covariance: Tensor, q: Tensor, ridge: float) -> Tensor:
    """Return ``(covariance + ridge I)^{-1} q`` by Cholesky, in float64: the condition is |covariance| / ridge."""
    eye = torch.eye(covariance.shape[-1], dtype=torch.float64, device=q.device)
    moments = covariance.double() + ridge * eye
    # A NaN of one row is that row's alone: the factorization would raise for the whole batch.
    broken = ~moments.sum((-2, -1)).isfinite()
    factor = torch.linalg.cholesky(torch.where(broken[..., None, None], eye, moments))
    solved = torch.cholesky_solve(q.double()[..., None], factor)[..., 0]
    return solved.masked_fill(broken[..., None], torch.nan).to(q.dtype)


def solve_all(q: Tensor, k: Tensor, g: Tensor | None, covariance: Tensor, ridge: float) -> Tensor:
    """Return ``(H_t + ridge I)^{-1} q_t`` for every token, forming the H_t of one chunk after another."""
    fade, carry = chunk_fades(g, q.dtype)
    if fade is None or carry is None:
        ones = torch.ones(q.shape[-2], q.shape[-2], dtype=q.dtype, device=q.device).tril()
        fade, carry = ones.expand(*q.shape[:-1], -1), torch.ones_like(q[..., :1])
    starts, _ = memories(k, k, fade, carry, covariance)
    solved = []
    for start, queries, keys, past, between in zip(*(x.unbind(2) for x in (starts, q, k, carry, fade)), strict=True):
        pairs = (keys[..., :, None] * keys[..., None, :]).flatten(-2)  # [B, G, C, KK]
        moments = (between @ pairs).unflatten(-1, start.shape[-2:]) + past[..., None] * start[..., None, :, :]
        solved.append(ridge_solve(moments, queries, ridge))
    return torch.stack(solved, 2)


class _Whitened(torch.autograd.Function):
    """``x_t = (H_t + ridge I)^{-1} q_t``, with the gradient of the implicit function.

    With ``w = (H + ridge I)^{-1} dx`` the gradient of q is w, and what H's parts get is that of
    ``-<w, linear attention(x; k, k)>`` with x and w held fast: no H_t of any token is kept.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, g: Tensor | None, covariance: Tensor, ridge: float) -> Tensor:
        return solve_all(q, k, g, covariance, ridge)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # ruff: ignore[any-type] - the framework's own
        *tensors, ctx.ridge = inputs
        ctx.save_for_backward(*tensors, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # ruff: ignore[any-type] - the framework's own
        _, k, g, covariance, x = ctx.saved_tensors
        w = _Whitened.apply(grad, k, g, covariance, ctx.ridge)

        def through_moments(k: Tensor, covariance: Tensor, g: Tensor | None = None) -> Tensor:
            return -(w * additive_chunks(x, k, k, g, (covariance,))[0]).sum()

        given = (k, covariance) if g is None else (k, covariance, g)
        value, pull = torch.func.vjp(through_moments, *given)[:2]
        dk, dh, *dg = pull(torch.ones_like(value))
        return w, dk, *(dg or [None]), dh, None
