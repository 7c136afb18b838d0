"""Large memory that calls no longer need, kept for the next call."""

from __future__ import annotations

import threading
import weakref
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from innerloop.kernels.native.library import LARGE, empty

if TYPE_CHECKING:
    import numpy as np

LIMIT = 128 << 20
"""Bytes that are kept at most."""


class Spare:
    """Keeps memory that has been used: fresh pages are zeroed by the system and are in no cache.

    Reading and writing a trail of 216 MiB in memory that was there before took a tenth off forward and backward.

    A tensor may be handed out again once nobody refers to its storage, which is seen by its view of the memory: the
    storage holds that view and nothing else does.

    Args:
        limit: Bytes to keep at most, in use or not. What would go beyond it is new memory, as any tensor's is.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        """Begin with nothing."""
        self._limit = limit
        self._kept: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []
        self._lock = threading.Lock()

    def take(self, like: Tensor) -> Tensor:
        """Return a tensor of bytes of any content, as many as ``like`` has."""
        size = like.nbytes
        if not LARGE <= size <= self._limit:
            return empty(like)
        with self._lock:
            kept = self._kept
            place = next((i for i, (memory, view) in enumerate(kept) if memory.nbytes == size and view() is None), -1)
            memory = kept.pop(place)[0] if place >= 0 else empty(like).numpy()
            view = memory[:]
            self._kept = _newest([(memory, weakref.ref(view)), *kept], self._limit)
        return torch.from_numpy(view)

    @property
    def nbytes(self) -> int:
        """How much is kept."""
        return sum(memory.nbytes for memory, _ in self._kept)


def _newest(
    kept: list[tuple[np.ndarray, weakref.ref[np.ndarray]]], limit: int
) -> list[tuple[np.ndarray, weakref.ref[np.ndarray]]]:
    """Return those that go into the limit together, from the first on."""
    sums = accumulate(memory.nbytes for memory, _ in kept)
    return [pair for pair, total in zip(kept, sums, strict=True) if total <= limit]
