"""The loss of a head, without ever holding the logits of a whole batch."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from innerloop.kernels.portable import full_precision
from innerloop.shapes import compute_dtype

Reduction = Literal["mean", "sum", "none"]
"""What becomes of the tokens' losses."""

IGNORED = -100
"""The label of a token that counts for nothing."""
_LOGITS = 1 << 19
"""Logits at once: of a thousand words they stay in the cache, and of many words the head's weight is read seldom."""
_FEWEST = 256
"""Tokens at once, however many words there are."""


def rows_at_once(words: int) -> int:
    """Return how many tokens' logits exist together."""
    return max(_FEWEST, _LOGITS // max(words, 1))


def head_loss(x: Tensor, weight: Tensor, labels: Tensor, reduction: Reduction = "mean") -> Tensor:
    """Return the cross entropy of ``x @ weight.T`` against ``labels``, a piece of the tokens at a time.

    Of a sum or a mean, the gradient is found on the way, while a piece's logits are there; single losses, and whoever
    differentiates the gradient, compute the logits anew in the backward pass.

    Args:
        x: What the head reads, ``[N, D]``.
        weight: The head's, ``[W, D]`` for W words.
        labels: The right word of each row, ``[N]``; -100 counts for nothing.
        reduction: ``"mean"`` over the labels that count (0 if none does), ``"sum"``, or ``"none"``.

    Returns:
        The loss in float32 or wider: a scalar, or ``[N]``, 0 where a label does not count.
    """
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    with full_precision(x):
        if reduction == "none":
            return _apart(x.to(dtype), weight.to(dtype), labels)
        total = _Sum.apply(x.to(dtype), weight.to(dtype), labels, torch.is_grad_enabled())
        assert isinstance(total, Tensor)
        return total if reduction == "sum" else total / (labels != IGNORED).sum().clamp(min=1)


def _apart(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    rows = rows_at_once(weight.shape[0])
    pieces = zip(x.split(rows), labels.split(rows), strict=True)
    learns = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return torch.cat([
        checkpoint(_losses, piece, weight, right, use_reentrant=False) if learns else _losses(piece, weight, right)
        for piece, right in pieces
    ])  # fmt: skip


def _losses(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(x, weight)
    return F.cross_entropy(logits.to(compute_dtype(logits.dtype)), labels, ignore_index=IGNORED, reduction="none")


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, learns: bool) -> Tensor:  # ruff: ignore[any-type] - the framework's own
        wide = compute_dtype(x.dtype)
        total = x.new_zeros((), dtype=torch.float64)
        d_x = torch.empty_like(x) if learns and x.requires_grad else None
        d_weight = torch.zeros_like(weight, dtype=wide) if learns and weight.requires_grad else None
        rows = rows_at_once(weight.shape[0])
        for start in range(0, len(x), rows):
            piece, right = x[start : start + rows], labels[start : start + rows]
            counts = right != IGNORED
            right = right.masked_fill(~counts, 0)[:, None]
            chance = torch.log_softmax((piece @ weight.mT).to(wide), 1)  # [rows, W]
            total -= chance.gather(1, right)[:, 0].masked_fill(~counts, 0).sum(dtype=torch.float64)
            if d_x is None and d_weight is None:
                continue
            slope = chance.exp_().scatter_add_(1, right, chance.new_full(right.shape, -1.0))
            slope = slope.mul_(counts[:, None]).to(x.dtype)
            if d_x is not None:
                torch.mm(slope, weight, out=d_x[start : start + rows])
            if d_weight is not None:
                _add_product(d_weight, slope, piece)
        ctx.save_for_backward(x, weight, labels, d_x, None if d_weight is None else d_weight.to(weight.dtype))
        return total.to(wide)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # ruff: ignore[any-type] - the framework's own
        x, weight, labels, *slopes = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return *(None if slope is None else gradient.to(slope.dtype) * slope for slope in slopes), None, None
        # A derivative of this one is wanted. Views, because x may have come from the same weight.
        inputs = (x.view_as(x), weight.view_as(weight))
        wanted = [y for y, need in zip(inputs, ctx.needs_input_grad, strict=False) if need]
        total = _apart(*inputs, labels).sum()
        found = iter(torch.autograd.grad(total, wanted, gradient.to(total.dtype), create_graph=True))
        return *(next(found) if need else None for need in ctx.needs_input_grad[:2]), None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left.mT, right)
    else:
        total += left.mT @ right
