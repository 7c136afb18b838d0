"""Linear maps into and out of heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from innerloop.kernels.portable import full_precision
from innerloop.nn.gates import Wide, wide_empty
from innerloop.shapes import compute_dtype


class Projection(nn.Linear):
    """A linear map without bias whose start is its own: torch's, or uniform in ±``bound`` (0: all zeros)."""

    def __init__(self, inputs: int, outputs: int, *, bound: float | None = None) -> None:
        """Draw the weights."""
        self.bound = bound
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        if self.bound is None:
            super().reset_parameters()
        else:
            nn.init.uniform_(self.weight, -self.bound, self.bound)


class LowRank(Wide):
    """RWKV-7's small network for gates: down, a nonlinearity, up, and an offset that says where the gate begins.

    It starts at its offset exactly: down is 0, up is orthogonal at a tenth. Its parameters are no Linear's, which
    foreign initialisations would draw anew. Computed in float32, or float64.
    """

    wide = ("offset",)
    spared = ("down", "up")

    def __init__(
        self,
        inputs: int,
        rank: int,
        outputs: int,
        *,
        activation: Literal["tanh", "sigmoid"] | None = None,
        start: Callable[[], Tensor] | None = None,
    ) -> None:
        """Begin; ``start`` makes the offset, and there is none without it."""
        super().__init__()
        self.activation, self.start = activation, start
        self.down = nn.Parameter(torch.empty(rank, inputs))
        self.up = nn.Parameter(torch.empty(outputs, rank))
        self.offset = None if start is None else nn.Parameter(wide_empty(outputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Begin anew."""
        if not self.down.is_meta:  # torch would load its compiler to draw nothing
            self._draw()
        self._mark()

    def _draw(self) -> None:
        nn.init.zeros_(self.down)
        outputs, rank = self.up.shape
        wide = torch.empty_like(self.up, dtype=compute_dtype(self.up.dtype))  # halves have no QR
        nn.init.orthogonal_(wide, gain=0.1 * math.sqrt(max(1.0, outputs / rank)))
        with torch.no_grad():
            self.up.copy_(wide)
            if self.offset is not None and self.start is not None:
                self.offset.copy_(self.start())

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., D]`` to wide ``[..., outputs]``."""
        dtype = compute_dtype(x.dtype)
        with full_precision(x):
            h = F.linear(x.to(dtype), self.down.to(dtype))
            if self.activation is not None:
                h = torch.tanh(h) if self.activation == "tanh" else torch.sigmoid(h)
            return F.linear(h, self.up.to(dtype), None if self.offset is None else self.offset.to(dtype))


def narrow(inputs: int, rank: int, outputs: int, *, bias: bool = False) -> nn.Sequential:
    """Return a linear map through fewer channels."""
    return nn.Sequential(nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=bias))


def heads(x: Tensor, count: int) -> Tensor:
    """Return ``[..., H * K]`` as ``[..., H, K]``."""
    return x.unflatten(-1, (count, -1))


def width_of_heads(width: int, count: int, given: int | None) -> int:
    """Return the width of a head: as given, else the model's width shared among the heads."""
    if count < 1 or (given is not None and given < 1):
        raise ValueError(f"heads and their widths must be at least 1; got {count} of {given}")
    if given is not None:
        return given
    if width % count:
        raise ValueError(f"heads must divide width={width}, or the widths of heads be given; got heads={count}")
    return width // count


def value_heads_of(count: int, given: int | None) -> int:
    """Return the number of value heads: as given, a multiple of the key heads, else as many."""
    if given is not None and (given < 1 or given % count):
        raise ValueError(f"value_heads must be a multiple of heads={count}; got {given}")
    return count if given is None else given
