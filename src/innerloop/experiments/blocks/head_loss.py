"""The loss of a language model's head, without ever holding the logits of a whole batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx

_ROWS = 512  # tokens at once: their logits over a thousand words stay in the cache


def head_loss(x: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of ``x @ weight.T + bias`` against ``target``, summed over tokens.

    The gradient is found on the way, while a piece's logits are there; it cannot be differentiated again.

    Args:
        x: What the head reads, ``[N, D]``.
        weight: The head's weight, ``[W, D]`` for W words.
        bias: The head's bias, ``[W]``.
        target: The right word of each row, ``[N]``.

    Returns:
        The sum, a scalar.
    """
    return _HeadLoss.apply(x, weight, bias, target, torch.is_grad_enabled())


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, learns: bool) -> Tensor:
        total = x.new_zeros((), dtype=torch.float64)
        slopes = (torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(bias)) if learns else None
        for start in range(0, len(x), _ROWS):
            rows = slice(start, start + _ROWS)
            logits = torch.addmm(bias, x[rows], weight.T)  # [rows, W]
            right = target[rows, None]
            chance = torch.log_softmax(logits, 1)
            total -= chance.gather(1, right).sum(dtype=torch.float64)
            if slopes is not None:
                _add_slopes(slopes, rows, x[rows], weight, chance.exp_(), right)
        if slopes is not None:
            ctx.save_for_backward(*slopes)
        return total.to(x.dtype)

    @staticmethod
    def backward(ctx: BackwardCFunction, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *(gradient * slope for slope in ctx.saved_tensors), None, None


def _add_slopes(
    slopes: tuple[Tensor, Tensor, Tensor], rows: slice, x: Tensor, weight: Tensor, chance: Tensor, right: Tensor
) -> None:
    d_x, d_weight, d_bias = slopes
    error = chance.scatter_add_(1, right, chance.new_full(right.shape, -1.0))
    torch.mm(error, weight, out=d_x[rows])
    d_weight.addmm_(error.T, x)
    d_bias += error.sum(0)
