"""Gradient descent with momentum and forgetting on a linear memory, exactly, a chunk at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from innerloop.algebra.chunks import stacked
from innerloop.algebra.decay import running_products
from innerloop.algebra.solve import solve_unit_lower


def momentum_chunks(
    q: Tensor, k: Tensor, v: Tensor, theta: Tensor, eta: Tensor, alpha: Tensor, states: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    r"""Read ``S_t`` of ``U_t = eta U - theta k (S^T k - v)^T``, ``S_t = (1 - alpha) S + U_t``, for all chunks.

    With P, M the running products of ``1 - alpha`` and ``eta`` and p, m, r = P m the weights of what came before the
    chunk, ``weight = P M`` holds how much of write s is in ``S_t``; a shift down by one gives ``S_{t-1}``, where the
    error is taken.

    .. math::
        (I + \mathrm{stril}(W^- \theta \circ K K^\top)) E = p^- \odot K S_0 + r^- \odot K U_0 - V, \qquad
        O = p \odot Q S_0 + r \odot Q U_0 - (W \theta \circ Q K^\top) E

    Returns:
        ``o``, ``[B, G, M, C, V]``, and memory and momentum after the last chunk.
    """
    keep = 1 - alpha
    product, momentum = running_products(keep), running_products(eta)  # [B, G, M, C, C]
    p = product[..., 0] * keep[..., :1]  # [B, G, M, C]
    m = momentum[..., 0] * eta[..., :1]
    r = (product @ m[..., None])[..., 0]
    weight = product @ momentum * theta[..., None, :]
    momentum = momentum[..., -1, :] * theta
    before_p, before_r, before = _one_earlier(p, 1.0), _one_earlier(r, 0.0), _rows_earlier(weight)
    coupling = before * (k @ k.mT)
    reads = torch.cat((before_p[..., None] * k, before_r[..., None] * k), -1)  # [B, G, M, C, 2K]
    writes = torch.cat((weight[..., -1, :, None] * k, momentum[..., None] * k), -1).mT  # [B, G, M, 2K, C]
    memory, velocity = states
    starts, errors = [], []
    ends = (x[..., -1, None, None].unbind(2) for x in (p, r, m))
    chunks = zip(*(x.unbind(2) for x in (coupling, v, reads, writes)), *ends, strict=True)
    for pairs, value, read, write, keep_s, take_u, keep_u in chunks:
        both = torch.cat((memory, velocity), -2)  # [B, G, 2K, V]
        starts.append(both)
        errors.append(solve_unit_lower(pairs, read @ both - value))
        step_s, step_u = (write @ errors[-1]).chunk(2, -2)
        memory, velocity = keep_s * memory + take_u * velocity - step_s, keep_u * velocity - step_u
    reads = torch.cat((p[..., None] * q, r[..., None] * q), -1)
    out = reads @ stacked(starts) - (weight * (q @ k.mT)) @ stacked(errors)
    return out, (memory, velocity)


def _one_earlier(x: Tensor, first: float) -> Tensor:
    return torch.cat((torch.full_like(x[..., :1], first), x[..., :-1]), -1)


def _rows_earlier(x: Tensor) -> Tensor:
    return torch.cat((torch.zeros_like(x[..., :1, :]), x[..., :-1, :]), -2)
