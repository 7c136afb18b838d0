"""The core of the rule whose memory moves with momentum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from innerloop.kernels.native.library import Core
from innerloop.kernels.native.matrix import Fields, Matrices
from innerloop.shapes import compute_dtype


class Momentum(Matrices):
    """The memory ``S`` and its momentum ``U``, through the library; the gates are theta, eta and alpha."""

    fields = Fields(7, 6, states=2)
    core = Core(2, fields.layout)
    long = 512

    def __init__(self) -> None:
        """Name the gates."""
        super().__init__(("theta", "eta", "alpha"), (3, 4, 5))

    def whole(self, held: Sequence[Any], size: int, together: int, unit: bool) -> tuple[int, ...]:
        """Return the whole numbers of a call."""
        del together
        k, v = held[1:3]
        return (k.shape[2], v.shape[2], k.shape[3], v.shape[3], size, unit, v.dtype is torch.float64)

    def gate_gradients(self, held: Sequence[Any]) -> list[tuple[Sequence[int], torch.dtype]]:
        """Return shapes and types of what the core gives for the gates."""
        v = held[2]
        return [(v.shape[:3], compute_dtype(v.dtype))] * 3
