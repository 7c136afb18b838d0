"""The triangular systems of the delta family."""

from __future__ import annotations

import torch
from torch import Tensor


def solve_unit_lower(pairs: Tensor, right: Tensor) -> Tensor:
    """Return X of ``(I + stril(pairs)) X = right`` by forward substitution; the rest of ``pairs`` is not read."""
    return torch.linalg.solve_triangular(pairs, right, upper=False, unitriangular=True)
