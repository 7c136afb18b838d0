"""What an operator asks of a compiled kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from innerloop.kernels.native.library import Core, Plan

State = Tensor | tuple[Tensor, ...] | None


class Values(NamedTuple):
    """A call for values, prepared: what is new in it are the addresses."""

    run: Plan
    out: Tensor
    """Outlines of what it returns, and of what it can leave for the gradients."""
    states: tuple[Tensor, ...]
    trail: Tensor | None = None


class Kernel(ABC):
    """What one of the library's cores computes: forward and backward."""

    core: ClassVar[Core]

    def __init__(self) -> None:
        """See whether the library has it."""
        self.present = self.core.present

    @abstractmethod
    def forward(
        self, inputs: Sequence[Any], options: Sequence[Any], leave: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Return the outputs (of a family ``o`` and the states), and what is left for ``backward``, if it is wanted."""

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


class Native(Kernel):
    """A family of rules, which also serves a single token."""

    def __init__(self, gates: tuple[str, ...]) -> None:
        """Say which gates the family takes, in the operator's order."""
        super().__init__()
        self.gates = gates

    @abstractmethod
    def prepare_token(
        self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Any], state: State, scale: float, unit: bool
    ) -> Values:
        """Return a call for one token, ``[B, G, .]``, good for all tensors of these shapes, strides and dtypes."""

    @abstractmethod
    def token(
        self,
        call: Values,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: dict[str, Any],
        state: State,
        overwrite: bool,
    ) -> tuple[Tensor, State]:
        """Return what the token reads, and the state after it, in the memory of the one before it or not.

        No gradient is recorded. A state to be overwritten is contiguous and in the precision of arithmetic.
        """
