"""Products of decays between two tokens, without ever dividing one by another.

Scalar decays come as logarithms and are cumulated in float64: a float32 sum cancels (1e-3 wrong at g = -5000) and
-inf - -inf is NaN. Factors in [0, 1] that are not logarithms (Titans' gates) go through running products, which are
exact at zero and have the right gradient there.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST = -120.0
"""A single log decay is clamped here: e^-120 is 0 beside anything it is added to, and sums of it stay finite."""


def cumulate(g: Tensor) -> Tensor:
    """Return the running sum of log decays over the last axis, in float64."""
    return g.double().clamp(min=SMALLEST).cumsum(-1)


def fade_between(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``exp(total_t - total_s)`` for s <= t and 0 above the diagonal, ``[..., C, C]``."""
    size = total.shape[-1]
    above = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
    difference = total[..., :, None] - total[..., None, :]
    return difference.masked_fill(above, -torch.inf).to(dtype).exp()


def running_products(factors: Tensor) -> Tensor:
    """Return ``P[t, s]``, the product of the factors after s up to t: 1 on the diagonal, 0 above, ``[..., C, C]``."""
    unit = torch.eye(factors.shape[-1], dtype=factors.dtype, device=factors.device)
    row = torch.zeros_like(factors)
    rows = []
    for factor, start in zip(factors.unbind(-1), unit.unbind(0), strict=True):
        row = factor[..., None] * row + start
        rows.append(row)
    return torch.stack(rows, -2)


def chunk_fades(g: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return the fade between tokens ``[..., C, C]`` and since the chunk's start ``[..., C, 1]``; Nones without g."""
    if g is None:
        return None, None
    total = cumulate(g)
    return fade_between(total, dtype), total.to(dtype).exp()[..., None]
