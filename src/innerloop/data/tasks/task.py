"""What a task is: sequences drawn from a generator, exact labels, and what who remembers nothing would score."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Integral
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

IGNORED = -100
"""The label of a token that asks nothing; ``torch.nn.functional.cross_entropy`` leaves it out by itself."""


class Batch(NamedTuple):
    """Sequences and what is right after each of their tokens."""

    inputs: Tensor
    """Tokens, int64 ``[B, T]``, or ``[B, T, C]`` for a task of several channels; or vectors, float32 ``[B, T, F]``."""
    labels: Tensor
    """Classes, int64 ``[B, T]``, with ``IGNORED`` where nothing is asked; or vectors ``[B, T, V]``, NaN there."""

    @property
    def asked(self) -> Tensor:
        """Which tokens ask something, ``[B, T]``."""
        return ~self.labels[..., 0].isnan() if self.labels.is_floating_point() else self.labels != IGNORED


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """Seeded sequences with exact labels.

    A task is a frozen record of its sizes; equal records and equal generators draw equal sequences.
    """

    name: ClassVar[str] = ""
    stretch: ClassVar[str] = ""
    """The field that makes sequences longer at the same difficulty of each answer; empty if there is none."""

    @property
    @abstractmethod
    def channels(self) -> tuple[int, ...]:
        """How many different tokens each channel has; empty if inputs are vectors."""

    @property
    @abstractmethod
    def outputs(self) -> int:
        """How many classes labels have, or how wide they are if they are vectors."""

    @property
    def features(self) -> int:
        """How wide inputs are if they are vectors; 0 for tokens."""
        return 0

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens of a sequence."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """The score of the best answer that does not look at the sequence, as ``score`` measures."""

    @property
    def shortcut(self) -> float:
        """The score of who knows what occurred in a sequence, but not what belongs to what; chance if there is none."""
        return self.chance

    @abstractmethod
    def draw(self, count: int, generator: torch.Generator) -> Batch:
        """Draw so many sequences.

        Args:
            count: How many.
            generator: What to draw from; nothing else decides.

        Returns:
            The sequences and their labels.
        """

    def score(self, answers: Tensor, labels: Tensor) -> Tensor:
        """Return how good each answer asked for is, ``[M]``: 1 or 0 for right or wrong, or 1 - square error / power.

        Args:
            answers: Logits, ``[B, T, outputs]``, or vectors ``[B, T, V]``.
            labels: As ``draw`` returns them.

        Returns:
            One number an answer that was asked for, in the order of rows and tokens; their mean is the score.
        """
        asked = Batch(answers, labels).asked
        if labels.is_floating_point():
            return 1 - (answers - labels)[asked].square().mean(-1) / self.power
        return (answers.argmax(-1) == labels)[asked].double()

    @property
    def power(self) -> float:
        """Mean square of a number of a vector label, which is the error of who answers 0."""
        return 1.0

    def longer(self, factor: int) -> Self:
        """Return the task with sequences ``factor`` times as long, if it has such a size.

        Args:
            factor: At least 1.

        Returns:
            The longer task.

        Raises:
            ValueError: If a longer sequence of it would be another task.
        """
        if factor == 1:
            return self
        if not self.stretch:
            raise ValueError(f"{self.name} has no longer form; its sequences are as long as its pairs make them")
        return dataclasses.replace(self, **{self.stretch: getattr(self, self.stretch) * factor})

    def _check_sizes(self, **least: int) -> None:
        for field, low in least.items():
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < low:
                raise ValueError(f"{self.name}'s {field} must be a whole number of at least {low}; got {value!r}")


def distinct(rows: int, total: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` different numbers below ``total`` for every row, in any order, int64 ``[rows, count]``."""
    return torch.rand(rows, total, generator=generator, dtype=torch.float64).argsort(1)[:, :count]


def permuted(rows: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw an order of ``count`` things for every row, int64 ``[rows, count]``."""
    return distinct(rows, count, count, generator)
