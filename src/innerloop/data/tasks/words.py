"""Word problems: which element of a group a product has reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from innerloop.data.tasks.task import Batch, Task

Permutation = tuple[int, ...]
"""Where each point goes: point i to place ``p[i]``."""

GENERATORS: dict[str, tuple[Permutation, ...]] = {
    "S3": ((1, 0, 2), (1, 2, 0)),
    "A5": ((1, 2, 3, 4, 0), (1, 2, 0, 3, 4)),
    "S5": ((1, 0, 2, 3, 4), (1, 2, 3, 4, 0)),
}
"""A transposition and a cycle of all points; for A5 a cycle of five and one of three."""


def composed(first: Permutation, second: Permutation) -> Permutation:
    """Return what two permutations do one after the other."""
    return tuple(second[place] for place in first)


def generated(generators: Sequence[Permutation]) -> list[Permutation]:
    """Return every product of the generators, sorted: the group, identity first.

    Args:
        generators: At least one permutation; all of as many points.

    Returns:
        Its elements.

    Raises:
        ValueError: If one is no permutation, or they differ in points.
    """
    if not generators:
        raise ValueError("generators must be at least one permutation; got none")
    points = len(generators[0])
    for p in generators:
        if sorted(p) != list(range(points)):
            raise ValueError(f"generators must be permutations of range({points}); got {p}")
    found = {tuple(range(points))}
    edge = list(found)
    while edge:
        edge = [p for p in {composed(p, g) for p in edge for g in generators} if p not in found]
        found.update(edge)
    return sorted(found)


@dataclass(frozen=True, kw_only=True)
class WordProblem(Task):
    """Words over a group; the label of each letter is the product of the word up to it, the first letter acting first.

    Letters are the generators, or with ``all_elements`` every element of the group. Merrill et al. (2024),
    arXiv:2404.08819.

    Example:
        >>> import torch
        >>> from innerloop.data.tasks import WordProblem
        >>> task = WordProblem(group="S3", letters=4)
        >>> inputs, labels = task.draw(1, torch.Generator().manual_seed(0))
        >>> [task.elements[label] for label in labels[0]]
        [(1, 0, 2), (2, 1, 0), (0, 2, 1), (1, 2, 0)]
    """

    name: ClassVar[str] = "words"
    stretch: ClassVar[str] = "letters"

    group: str | tuple[Permutation, ...] = "S3"
    """``S3``, ``A5``, ``S5``, or the permutations that generate another."""
    letters: int = 16
    """Of a word."""
    all_elements: bool = False

    def __post_init__(self) -> None:
        """Check the sizes, and that the group is one."""
        self._check_sizes(letters=1)
        if isinstance(self.group, str):
            if self.group not in GENERATORS:
                raise ValueError(f"words's group must be one of {', '.join(GENERATORS)}, or permutations; "
                                 f"got {self.group!r}")  # fmt: skip
        else:
            object.__setattr__(self, "group", tuple(tuple(p) for p in self.group))
        generated(self.generators)

    @property
    def generators(self) -> tuple[Permutation, ...]:
        """The permutations that generate the group."""
        return GENERATORS[self.group] if isinstance(self.group, str) else self.group

    @cached_property
    def elements(self) -> list[Permutation]:
        """Every element, by its label; 0 is the identity."""
        return generated(self.generators)

    @property
    def alphabet(self) -> Sequence[Permutation]:
        """What each letter does."""
        return self.elements if self.all_elements else self.generators

    @cached_property
    def table(self) -> Tensor:
        """Label of the product of an element and a letter, ``[elements, letters]``."""
        place = {p: n for n, p in enumerate(self.elements)}
        return torch.tensor([[place[composed(p, g)] for g in self.alphabet] for p in self.elements])

    @property
    def channels(self) -> tuple[int, ...]:
        """Letters."""
        return (len(self.alphabet),)

    @property
    def outputs(self) -> int:
        """Elements."""
        return len(self.elements)

    @property
    def length(self) -> int:
        """As stated."""
        return self.letters

    @property
    def chance(self) -> float:
        """The likeliest element at each place, exactly: early products are few, and odd letters alternate."""
        return self.chances().mean().item()

    def chances(self) -> Tensor:
        """Return how likely the likeliest element is at each place, ``[letters]``."""
        now = torch.zeros(self.outputs, dtype=torch.float64)
        now[0] = 1
        best = []
        for _ in range(self.letters):
            after = torch.zeros_like(now)
            for letter in range(len(self.alphabet)):
                after.index_add_(0, self.table[:, letter], now / len(self.alphabet))
            now = after
            best.append(now.max())
        return torch.stack(best)

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        """Draw so many words ``[count, letters]``, with a label at every letter."""
        word = torch.randint(len(self.alphabet), (count, self.letters), generator=generator)
        reached, labels = torch.zeros(count, dtype=torch.int64), []
        for t in range(self.letters):
            reached = self.table[reached, word[:, t]]
            labels.append(reached)
        return Batch(word, torch.stack(labels, 1))
