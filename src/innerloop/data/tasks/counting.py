"""Counting: a number that every token changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from innerloop.data.tasks.task import IGNORED, Batch, Task


@dataclass(frozen=True, kw_only=True)
class Parity(Task):
    """Bits; the label of each is whether the number of ones so far, itself included, is odd.

    Example:
        >>> import torch
        >>> from innerloop.data.tasks import Parity
        >>> inputs, labels = Parity(bits=5).draw(1, torch.Generator().manual_seed(0))
        >>> inputs.tolist(), labels.tolist()
        ([[0, 1, 1, 0, 1]], [[0, 1, 0, 0, 1]])
    """

    name: ClassVar[str] = "parity"
    stretch: ClassVar[str] = "bits"

    bits: int = 16

    def __post_init__(self) -> None:
        """Check the size."""
        self._check_sizes(bits=1)

    @property
    def channels(self) -> tuple[int, ...]:
        """Two."""
        return (2,)

    @property
    def outputs(self) -> int:
        """Two."""
        return 2

    @property
    def length(self) -> int:
        """As stated."""
        return self.bits

    @property
    def chance(self) -> float:
        """A coin."""
        return 0.5

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        """Draw so many words ``[count, bits]``, with a label at every bit."""
        bits = torch.randint(2, (count, self.bits), generator=generator)
        return Batch(bits, bits.cumsum(1) % 2)


@dataclass(frozen=True, kw_only=True)
class ModularArithmetic(Task):
    """Sums and products modulo ``modulus``; the label of each number is the value of the expression up to it.

    Numbers and signs take turns; a product binds before a sum, as in school. Numbers are the tokens below ``modulus``,
    signs those behind them, in the order of ``signs``. Delétang et al. (2022), arXiv:2207.02098, simple form.
    """

    name: ClassVar[str] = "arithmetic"
    stretch: ClassVar[str] = "numbers"

    modulus: int = 5
    numbers: int = 8
    signs: str = "+-*"

    def __post_init__(self) -> None:
        """Check the sizes."""
        self._check_sizes(modulus=2, numbers=1)
        if not self.signs or set(self.signs) - set("+-*") or len(set(self.signs)) < len(self.signs):
            raise ValueError(f"arithmetic's signs must be some of + - *, each once; got {self.signs!r}")

    @property
    def channels(self) -> tuple[int, ...]:
        """Numbers and signs."""
        return (self.modulus + len(self.signs),)

    @property
    def outputs(self) -> int:
        """Numbers."""
        return self.modulus

    @property
    def length(self) -> int:
        """Numbers and the signs between them."""
        return 2 * self.numbers - 1

    @property
    def chance(self) -> float:
        """The likeliest value at each number, with products zero is; exactly, by following both sums' chances."""
        m, share = self.modulus, 1 / (self.modulus * len(self.signs))
        now = torch.zeros(m, m, dtype=torch.float64)  # what is added up, and the term that is not yet closed
        now[0] = 1 / m
        best = [1 / m]
        for _ in range(self.numbers - 1):
            after = torch.zeros_like(now)
            for total in range(m):
                for term in range(m):
                    for sign in self.signs:
                        for number in range(m):
                            after[_followed(total, term, sign, number, m)] += now[total, term] * share
            now = after
            value = sum((torch.roll(now[total], total) for total in range(m)), torch.zeros(m, dtype=torch.float64))
            best.append(value.max().item())
        return sum(best) / len(best)

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        """Draw so many expressions; each number has a label."""
        m = self.modulus
        numbers = torch.randint(m, (count, self.numbers), generator=generator)
        signs = torch.randint(len(self.signs), (count, self.numbers - 1), generator=generator)
        total, term = torch.zeros(count, dtype=torch.int64), numbers[:, 0]
        values = [term]
        for t in range(1, self.numbers):
            sign, number = signs[:, t - 1], numbers[:, t]
            times = sign == self.signs.find("*")
            minus = sign == self.signs.find("-")
            total = torch.where(times, total, (total + term) % m)
            term = torch.where(times, term * number, torch.where(minus, -number, number)) % m
            values.append((total + term) % m)
        inputs = torch.empty(count, self.length, dtype=torch.int64)
        inputs[:, ::2], inputs[:, 1::2] = numbers, m + signs
        labels = torch.full_like(inputs, IGNORED)
        labels[:, ::2] = torch.stack(values, 1)
        return Batch(inputs, labels)

    def spell(self, inputs: Tensor) -> str:
        """Return an expression ``[T]`` as it is written."""
        return "".join(str(x) if x < self.modulus else self.signs[x - self.modulus] for x in inputs.tolist())


def _followed(total: int, term: int, sign: str, number: int, modulus: int) -> tuple[int, int]:
    if sign == "*":
        return total, term * number % modulus
    return (total + term) % modulus, (number if sign == "+" else -number) % modulus
