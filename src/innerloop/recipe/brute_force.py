"""The weighted regression over the whole past, solved for every token by brute force: a second opinion on the loop."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from innerloop.recipe.memory import KernelSmoother, LinearMemory
from innerloop.recipe.weights import Weights


def optimum_reads(
    weights: Weights, memory: LinearMemory, ridge: Tensor | float, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Return what the optimum after each token reads, ``[B, T, G, V]``; gates ride in ``weights`` and ``ridge``."""
    asked, stored = (memory.features(x.transpose(1, 2)) for x in (q, k))  # [B, G, T, F]
    targets = v.transpose(1, 2)
    if isinstance(ridge, Tensor) and ridge.dim() == 1:  # a number a head, the same for every token
        ridge = ridge.to(q.dtype).expand(q.shape[:3])
    outputs = []
    for t, gamma in enumerate(weights.history(q, k)):
        past, target = stored[:, :, : t + 1], targets[:, :, : t + 1]
        now = ridge[:, t] if isinstance(ridge, Tensor) else ridge
        if isinstance(memory, KernelSmoother):
            outputs.append(_weighted_mean(target, gamma, now))
        else:
            fitted = _least_squares(past, target, gamma, now)
            outputs.append((asked[:, :, t : t + 1] @ fitted).squeeze(2))
    return torch.stack(outputs, dim=1) if outputs else torch.zeros_like(v)


def _weighted_mean(v: Tensor, gamma: Tensor, ridge: Tensor | float) -> Tensor:
    """Return the mean of values ``[B, G, N, V]``; a total weight of 0 reads 0."""
    total = gamma.sum(-1, keepdim=True) + (ridge.reshape(*gamma.shape[:2], 1) if isinstance(ridge, Tensor) else ridge)
    empty = total == 0
    return (gamma.unsqueeze(-1) * v).sum(2) / torch.where(empty, 1.0, total) * ~empty


def _least_squares(x: Tensor, v: Tensor, gamma: Tensor, ridge: Tensor | float) -> Tensor:
    """Fit ``[B, G, F, V]`` to N rows through the design matrix, never through its square.

    Returns:
        The fit; of least norm where many are equally good.

    Raises:
        ValueError: If a weight is negative, for then there is nothing to minimise.
    """
    if bool((gamma < 0).any()):
        raise ValueError("fit_all needs weights of at least 0; got a negative one. Use a kernel that is positive.")
    width = x.shape[-1]
    if isinstance(ridge, Tensor):
        penalty = ridge.sqrt().reshape(*x.shape[:2], -1).expand(*x.shape[:2], width)
    else:
        penalty = x.new_full((*x.shape[:2], width), math.sqrt(ridge))
    root = gamma.sqrt().unsqueeze(-1)
    design = torch.cat([root * x, torch.diag_embed(penalty)], dim=2)  # [B, G, N + F, F]
    target = torch.cat([root * v, v.new_zeros(*v.shape[:2], width, v.shape[-1])], dim=2)
    return torch.linalg.pinv(design) @ target
