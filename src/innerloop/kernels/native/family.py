"""What an operator asks of a compiled kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from innerloop.kernels.native.library import Core

State = Tensor | tuple[Tensor, ...] | None


class Native(ABC):
    """A family through one of the library's cores: forward, backward and a single token."""

    core: ClassVar[Core]

    def __init__(self, gates: tuple[str, ...]) -> None:
        """Say which gates the family takes, in the operator's order."""
        self.gates = gates
        self.present = self.core.present

    @abstractmethod
    def forward(
        self, inputs: Sequence[Any], options: Sequence[Any], leave: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Return ``o`` and the states after the last token, and what it leaves for ``backward``, if that is wanted."""

    @abstractmethod
    def backward(
        self,
        inputs: Sequence[Any],
        options: Sequence[Any],
        grads: Sequence[Tensor | None],
        needs: Sequence[bool],
        left: Tensor | None = None,
    ) -> list[Tensor]:
        """Return the gradients of those inputs that need one; with what ``forward`` left, nothing is computed twice."""

    @abstractmethod
    def token(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: dict[str, Any],
        state: State,
        scale: float,
        unit: bool,
        overwrite: bool,
    ) -> tuple[Tensor, State]:
        """Return what one token ``[B, G, .]`` reads, and the state after it, in the memory of the one before it or not.

        No gradient is recorded. A state to be overwritten is contiguous and in the precision of arithmetic.
        """
