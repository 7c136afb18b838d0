"""Rows of one length, with a gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from innerloop.shapes import compute_dtype

Measure = Literal["mean", "sum", "floor"]
"""What becomes 1: the mean of the squares, their sum (both with eps beside it), or the sum where it is above eps²."""

Activation = Literal["silu", "sigmoid"]
"""Of a gate."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


def gated_norm(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    measure: Measure,
    eps: float,
    activation: Activation,
    gate_first: bool,
) -> Tensor:
    r"""Give the last axis one length, in float32 or wider.

    .. math:: y = w \circ r x \circ \phi(z), \quad r = (\mathrm{mean}(x^2) + \epsilon)^{-1/2}

    Args:
        x: ``[..., D]``.
        gate: What the activation takes, of x's shape, or None.
        weight: ``[D]``, or None for ones.
        measure: What the length is.
        eps: See there.
        activation: Of the gate.
        gate_first: Whether the gate comes before the norm.

    Returns:
        ``y`` in x's dtype.
    """
    dtype = compute_dtype(x.dtype)
    y = x.to(dtype)
    factor = None if gate is None else ACTIVATIONS[activation](gate.to(dtype))
    if factor is not None and gate_first:
        y = y * factor
    if measure == "floor":
        y = F.normalize(y, dim=-1, eps=eps)
    else:
        square = y.square()
        square = square.mean(-1, keepdim=True) if measure == "mean" else square.sum(-1, keepdim=True)
        y = y * torch.rsqrt(square + eps)
    if weight is not None:
        y = y * weight.to(dtype)
    if factor is not None and not gate_first:
        y = y * factor
    return y.to(x.dtype)
