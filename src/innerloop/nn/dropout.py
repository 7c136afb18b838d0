"""Dropout whose mask takes a fifth of the time of torch's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_STEPS = 1 << 16
"""Chances that can be told apart."""


class Dropout(nn.Dropout):
    """Numbers set to 0 by chance in training, the others scaled up so that the mean stays.

    Of each number drawn from torch's generator four places of the mask are made, 16 bits each: the chance is rounded
    to 1/65,536. On other devices, and where something transforms or compiles the call, it is torch's own.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[...]`` to the same shape."""
        dropped = round(self.p * _STEPS)
        if not self.training or dropped == 0:
            return input
        plain = type(input) is Tensor and input.is_cpu and not torch.compiler.is_compiling()
        if not plain or self.inplace or dropped == _STEPS or torch._C._are_functorch_transforms_active():
            return super().forward(input)
        return input * mask(input, dropped)


def mask(like: Tensor, dropped: int) -> Tensor:
    """Return what a tensor is multiplied with: 0 at ``dropped`` of 65,536 places, else what keeps the mean."""
    count = like.numel()
    drawn = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(1 << 63), None)
    found = torch.empty(like.shape, dtype=like.dtype)
    torch.ge(drawn.view(torch.int16)[:count].view(like.shape), dropped - _STEPS // 2, out=found)
    return found.mul_(_STEPS / (_STEPS - dropped))
