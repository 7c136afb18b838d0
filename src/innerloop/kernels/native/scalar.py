"""The core of all rules whose memory fades by one number a token, as three families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from innerloop.kernels.native.library import Core
from innerloop.kernels.native.matrix import Fields, Matrices
from innerloop.shapes import compute_dtype

_GATES = ("g", "beta")


class Scalar(Matrices):
    """A family with one matrix for its state, through the library.

    Args:
        corrects: 0 if a pair is added, 1 for the delta rule, 2 for the delta rule at the rate of its proximal step.
        gates: Which gates it takes, of ``g`` and ``beta``, in order.
    """

    fields = Fields(9, 5)
    core = Core(0, fields.layout)
    long = 512
    together = 4

    def __init__(self, corrects: int, gates: tuple[str, ...]) -> None:
        """Say which family it is."""
        super().__init__(gates, [3 + _GATES.index(gate) for gate in gates])
        self.corrects = corrects

    def whole(self, held: Sequence[Any], size: int, together: int, unit: bool) -> tuple[int, ...]:
        """Return the whole numbers of a call."""
        k, v = held[1:3]
        return (self.corrects, k.shape[2], v.shape[2], k.shape[3], v.shape[3], together, size, unit,
                v.dtype is torch.float64)  # fmt: skip

    def gate_gradients(self, held: Sequence[Any]) -> list[tuple[Sequence[int], torch.dtype]]:
        """Return shapes and types of what the core gives for the gates."""
        v = held[2]
        return [(v.shape[:3], compute_dtype(v.dtype))] * len(self.gates)
