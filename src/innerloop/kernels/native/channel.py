"""The core of all rules whose memory fades channel by channel, as four families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from innerloop.kernels.native.library import ELEMENTS, Core
from innerloop.kernels.native.matrix import Fields, Matrices
from innerloop.shapes import compute_dtype

_KINDS = (("g",), ("g", "beta"), ("g", "b", "w"), ("g", "a", "kappa"))


class Channel(Matrices):
    """A family with one matrix for its state whose channels fade apart, through the library.

    Args:
        gates: Which gates it takes, in order, which says what it is: ``g``; ``g`` and ``beta``; ``g``, ``b`` and ``w``;
            or ``g``, ``a`` and ``kappa``.
    """

    fields = Fields(8, 6, types=2)
    core = Core(1, fields.layout)

    def __init__(self, gates: tuple[str, ...]) -> None:
        """Say which family it is."""
        super().__init__(gates, range(3, 3 + len(gates)))
        self.kind = _KINDS.index(gates)

    def whole(self, held: Sequence[Any], size: int, together: int, unit: bool) -> tuple[int, ...]:
        """Return the whole numbers of a call."""
        del together
        k, v = held[1:3]
        return (self.kind, k.shape[2], v.shape[2], k.shape[3], v.shape[3], size, unit, v.dtype is torch.float64)

    def gate_gradients(self, held: Sequence[Any]) -> list[tuple[Sequence[int], torch.dtype]]:
        """Return shapes and types of what the core gives for the gates."""
        k, v, *gates = held[1:-2]
        found = [(gate.shape, gate.dtype) for gate in gates]
        if self._shares(held):  # kappa, from every head of values
            found[-1] = (*v.shape[:3], k.shape[3]), compute_dtype(v.dtype)
        return found

    def types(self, wide: torch.dtype, held: Sequence[Any]) -> tuple[int, ...]:
        """Return the types of the gradients of q and k, and of that of kappa."""
        return ELEMENTS[wide], ELEMENTS[self.gate_gradients(held)[-1][1]]

    def _shares(self, held: Sequence[Any]) -> bool:
        return self.gates[-1] == "kappa" and held[2].shape[2] > held[1].shape[2]
