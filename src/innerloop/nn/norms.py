"""What becomes of a memory's read before it leaves the layer: normed by head, and gated."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from innerloop.algebra.norm import ACTIVATIONS, Activation
from innerloop.kernels.parts import norm
from innerloop.shapes import compute_dtype


class RMSNorm(nn.Module):
    """Root mean square over the last axis to 1, in float32 or wider; times a gate, if one is given.

    The gate comes after the norm, or before it (``gate_first``, as in Mamba-2).
    """

    def __init__(
        self,
        width: int,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        activation: Activation = "silu",
        gate_first: bool = False,
    ) -> None:
        """Begin with weights of 1."""
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
        self.eps, self.gate_first = eps, gate_first
        self.activation: Activation = activation
        self.weight = nn.Parameter(torch.empty(width)) if affine else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Begin anew."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Norm ``[..., width]``; a gate has its shape."""
        return norm(
            x, gate, self.weight, eps=self.eps, activation=self.activation, gate_first=self.gate_first
        )


def unit(x: Tensor) -> Tensor:
    """Return ``[..., D]`` at length 1, in float32 or wider, as ``torch.nn.functional.normalize`` does."""
    return norm(x, measure="floor", eps=1e-12)


class HeadNorm(nn.Module):
    """Mean 0 and variance 1 in every head, then a weight and a bias for each channel: a group norm of heads."""

    def __init__(self, heads: int, width: int, *, eps: float, start: float = 1.0) -> None:
        """Begin with weights of ``start`` and no bias."""
        super().__init__()
        self.eps, self.start = eps, start
        self.weight = nn.Parameter(torch.empty(heads * width))
        self.bias = nn.Parameter(torch.empty(heads * width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Begin anew."""
        nn.init.constant_(self.weight, self.start)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Norm ``[..., G, V]``, in float32 or wider."""
        dtype = compute_dtype(x.dtype)
        y = x.to(dtype)
        y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        weight, bias = (p.to(dtype).view(x.shape[-2:]) for p in (self.weight, self.bias))
        return (y * weight + bias).to(x.dtype)
