"""What an operator asks of a compiled kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from innerloop.kernels.native.library import Core, Plan, Recent, structure


class Values(NamedTuple):
    """A call for values, prepared: what is new in it are the addresses."""

    run: Plan
    out: Tensor
    """Outlines of what it returns, and of what it can leave for the gradients."""
    states: tuple[Tensor, ...]
    trail: Tensor | None = None
    records: bool = False
    """Whether it is for a call whose gradients are wanted."""
    direct: bool = False
    """Whether inputs like those it was prepared for are read where they are."""


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
        """Return the operator's outputs, and what it leaves for ``backward`` if it may."""

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
    """A family of rules: its calls are prepared once, and single tokens are served too."""

    def __init__(self, gates: tuple[str, ...]) -> None:
        """Say which gates the family takes, in the operator's order."""
        super().__init__()
        self.gates = gates
        self._prepared = Recent[Values]()

    @abstractmethod
    def prepare(self, held: Sequence[Any], options: Sequence[Any], leave: bool) -> Values:
        """Return a call good for all inputs of these shapes, strides and dtypes, which leaves a trail or not.

        ``held`` is what ``as_read`` returns.
        """

    @abstractmethod
    def chunk_size(self, asked: int, length: int, key_width: int, width: int, records: bool) -> int:
        """Return how many tokens a chunk takes, at most those asked for; ``records``: of a call with gradients."""

    @abstractmethod
    def as_read(self, inputs: Sequence[Any], bounds: Tensor | None) -> list[Any]:
        """Return an operator's inputs and the bounds of packed sequences as kernels read them."""

    def again(self, call: Values, inputs: Sequence[Any]) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Return what ``run`` does, of inputs that are not packed and like those that the call was prepared for."""
        return self.run(call, [*inputs, None] if call.direct else self.as_read(inputs, None))

    @abstractmethod
    def run(self, call: Values, held: Sequence[Any]) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Return ``o`` and the states after the last token, and what the call leaves for ``backward``."""

    def forward(
        self, inputs: Sequence[Any], options: Sequence[Any], leave: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Return the same of a call that is prepared here, unless one like it was."""
        held = self.as_read(inputs, options[0])
        key = [leave, options[1:4], *structure(held)]
        return self.run(self._prepared.get(key) or self._prepared.put(key, self.prepare(held, options, leave)), held)

    @abstractmethod
    def prepare_token(
        self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Any], states: Sequence[Any], scale: float, unit: bool
    ) -> Values:
        """Return a call for one token, ``[B, G, .]``, good for all tensors of these shapes, strides and dtypes."""

    @abstractmethod
    def token(
        self, call: Values, inputs: Sequence[Any], states: Sequence[Any], overwrite: bool
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return what the token reads, and the states after it, in the memory of those before it or not.

        ``inputs`` are q, k, v and the family's gates. No gradient is recorded. States to be overwritten are contiguous
        and in the precision of arithmetic.
        """
