"""What an operator asks of a compiled kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from innerloop.kernels.native.library import Core

State = Tensor | tuple[Tensor, ...] | None


class Kernel(ABC):
    """What one of the library's cores computes: forward and backward."""

    core: ClassVar[Core]

    def __init__(self) -> None:
        """See whether the library has it."""
        self.present = self.core.present

    @abstractmethod
    def forward(self, inputs: Sequence[Any], options: Sequence[Any]) -> tuple[Tensor, ...]:
        """Return the operator's outputs: of a family ``o`` and the states after the last token."""

    @abstractmethod
    def backward(
        self, inputs: Sequence[Any], options: Sequence[Any], grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> list[Tensor]:
        """Return the gradients of those inputs that need one."""


class Native(Kernel):
    """A family of rules, which also serves a single token."""

    def __init__(self, gates: tuple[str, ...]) -> None:
        """Say which gates the family takes, in the operator's order."""
        super().__init__()
        self.gates = gates

    @abstractmethod
    def token(
        self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Any], state: State, scale: float, unit: bool
    ) -> tuple[Tensor, State]:
        """Return what one token ``[B, G, .]`` reads, and the state after it; no gradient is recorded."""
