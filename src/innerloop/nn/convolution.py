"""The short causal convolution in front of a memory: every channel looks at its own last few inputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from innerloop.kernels.parts import convolve


class ShortConvolution(nn.Module):
    """A depthwise causal convolution over time, and SiLU; unless ``silu`` what it finds is added to its input.

    Its weight is ``[C, W]``, the newest input last; the start is that of ``torch.nn.Conv1d``, uniform in ±1/√W.
    """

    def __init__(self, channels: int, taps: int = 4, *, bias: bool = False, silu: bool = True) -> None:
        """Draw the weights."""
        super().__init__()
        if isinstance(taps, bool) or not isinstance(taps, int) or taps < 1:
            raise ValueError(f"a convolution must have at least 1 tap, a whole number; got {taps}")
        self.channels, self.taps, self.silu = channels, taps, silu
        self.weight = nn.Parameter(torch.empty(channels, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        bound = 1 / math.sqrt(self.taps)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, window: Tensor, bounds: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Convolve ``[B, T, C]`` behind the last W - 1 inputs of each sequence, and return the newer ones too."""
        if x.shape[-1] != self.channels:
            raise ValueError(f"x must have {self.channels} channels; got {x.shape[-1]}")
        y, window = convolve(x, window, self.weight, self.bias, bounds, silu=self.silu)
        return (y if self.silu else x + y), window

    def extra_repr(self) -> str:
        """Say the sizes."""
        return f"{self.channels}, taps={self.taps}, bias={self.bias is not None}, silu={self.silu}"
