"""Rotations that tell an inner product how far apart two tokens are."""

from __future__ import annotations

import torch
from torch import Tensor

from innerloop.shapes import compute_dtype


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Turn the pairs (c, c + K/2) of ``[B, T, H, K]`` by ``position * frequency``, positions ``[B, T]``."""
    dtype = compute_dtype(x.dtype)
    # In float64: at position 100,000 a float32 angle is off by 4e-3.
    angle = positions[..., None].double() * frequencies  # [B, T, K/2]
    cos, sin = angle.cos()[:, :, None].to(dtype), angle.sin()[:, :, None].to(dtype)
    first, second = x.to(dtype).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def frequencies_of(width: int, base: float, device: torch.device, *, reach_base: bool = False) -> Tensor:
    """Return ``base^(-2c/K)``, from 1 down to just above 1 / base, or down to it as RetNet has it."""
    pairs = width // 2
    place = torch.arange(pairs, dtype=torch.float64, device=device)
    return base ** -(place / max(pairs - 1, 1) if reach_base else place / pairs)


def check_rotary(width: int) -> None:
    """Raise ValueError unless channels go in pairs."""
    if width % 2:
        raise ValueError(f"key_width must be even, rotations turn pairs of channels; got {width}")
