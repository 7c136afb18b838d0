"""Solutions of linear systems with the gradient of the implicit function."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def must_stay_open() -> bool:
    """Whether ``torch.func`` or forward mode watches: no custom Function may run there."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
