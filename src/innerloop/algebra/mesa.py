"""Ridge regression over the past by conjugate gradients, all tokens at once."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from innerloop.algebra.additive import additive_chunks, memories
from innerloop.algebra.conjugate_gradients import conjugate_gradients
from innerloop.algebra.decay import chunk_fades
from innerloop.algebra.implicit import implicit_solution
from innerloop.algebra.ridge import each_covariance, fades_or_ones, ridge_solve

TOGETHER = 2**16
"""Entries of queries that are solved for together: all that thirty steps touch should stay in the cache."""


def mesa_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lamb: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    states: tuple[Tensor, ...],
    iterations: float,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    r"""Read ``o_t = H_kv^T (H_kk + diag lamb)^{-1} q_t`` of moments that fade and add by ``beta``, for all chunks.

    The rows x_t of X solve for their q_t together: with P the decays between two tokens,

    .. math:: (H_t + \Lambda) x_t \; \text{is row} \; t \; \text{of} \;
        p \odot (X H_0) + (P \beta \circ X K^\top) K + \lambda \circ X,

    so that no H_t is formed. The start is that of von Oswald et al. (2025), arXiv:2506.05233, q over the diagonal;
    the preconditioner is lamb, not the diagonal: keys that repeat or point one way give H few directions, which stay
    few in units of lamb (1e-14 where the diagonal's 30 steps leave 1e-4: one key 1024 times, K = 64).

    Returns:
        ``o``, ``[B, G, M, C, V]``, and both moments after the last chunk.
    """
    covariance, cross = states
    covariance = (covariance + covariance.mT) / 2
    solve = partial(_solve, iterations=int(iterations))
    x = implicit_solution(solve, _solve_exactly, _product, q, k, lamb, g, beta, covariance)
    written = _weighted(k, beta)
    out, (cross,) = additive_chunks(x, written, v, g, (cross,))
    fade, carry = chunk_fades(g, q.dtype)
    return out, (memories(written, k, fade, carry, covariance)[1], cross)


def mesa_solve(covariance: Tensor, q: Tensor, lamb: Tensor, iterations: float) -> Tensor:
    """Return ``(covariance + diag lamb)^{-1} q`` of one token by conjugate gradients; gradients are the solution's."""
    solve = partial(_solve_token, iterations=int(iterations))
    return implicit_solution(solve, _solve_token_exactly, _token_product, q, covariance, lamb)


def _weighted(k: Tensor, beta: Tensor | None) -> Tensor:
    return k if beta is None else beta[..., None] * k


def _solve(
    q: Tensor, k: Tensor, lamb: Tensor, g: Tensor | None, beta: Tensor | None, covariance: Tensor, *, iterations: int
) -> Tensor:
    fade, carry = fades_or_ones(g, k)
    starts, _ = memories(_weighted(k, beta), k, fade, carry, covariance)
    pairs = fade if beta is None else fade * beta[..., None, :]  # [B, G, M, C, C]
    chunks = max(1, TOGETHER // (q[:, :, 0].numel() or 1))
    parts = zip(*(x.split(chunks, 2) for x in (q, k, lamb, carry, pairs, starts)), strict=True)
    return torch.cat([_solve_part(*part, iterations=iterations) for part in parts], 2)


def _solve_part(
    q: Tensor, k: Tensor, lamb: Tensor, carry: Tensor, pairs: Tensor, starts: Tensor, *, iterations: int
) -> Tensor:
    def product(x: Tensor) -> Tensor:
        return torch.addcmul(torch.addcmul((pairs * (x @ k.mT)) @ k, carry, x @ starts), lamb, x)

    diagonal = carry * starts.diagonal(dim1=-2, dim2=-1)[..., None, :] + pairs @ k.square() + lamb
    return conjugate_gradients(product, q, iterations=iterations, diagonal=lamb, start=q / diagonal)


def _solve_exactly(
    q: Tensor, k: Tensor, lamb: Tensor, g: Tensor | None, beta: Tensor | None, covariance: Tensor
) -> Tensor:
    moments = each_covariance(k, _weighted(k, beta), g, covariance)
    tokens = zip(moments, q.unbind(2), lamb.unbind(2), strict=True)
    return torch.stack([ridge_solve(h, x, ridge) for h, x, ridge in tokens], 2)


def _product(x: Tensor, k: Tensor, lamb: Tensor, g: Tensor | None, beta: Tensor | None, covariance: Tensor) -> Tensor:
    return additive_chunks(x, _weighted(k, beta), k, g, (covariance,))[0] + lamb * x


def _solve_token(q: Tensor, covariance: Tensor, lamb: Tensor, *, iterations: int) -> Tensor:
    matrix = covariance + torch.diag_embed(lamb)
    start = q / matrix.diagonal(dim1=-2, dim2=-1)
    rows, diagonal, first = (x[..., None, :] for x in (q, lamb, start))
    found = conjugate_gradients(lambda x: x @ matrix, rows, iterations=iterations, diagonal=diagonal, start=first)
    return found[..., 0, :]


def _solve_token_exactly(q: Tensor, covariance: Tensor, lamb: Tensor) -> Tensor:
    return ridge_solve(covariance, q, lamb)


def _token_product(x: Tensor, covariance: Tensor, lamb: Tensor) -> Tensor:
    return (covariance @ x[..., None])[..., 0] + lamb * x
