"""Selective copying: what was told among noise is told again, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from innerloop.data.tasks.task import IGNORED, Batch, Task, distinct


@dataclass(frozen=True, kw_only=True)
class SelectiveCopying(Task):
    """Words stand at random places among ``noise`` blanks; then, at as many marks, they are asked for in their order.

    Words are the tokens below ``words``, the blank is token ``words``, the mark the one behind it. Gu and Dao (2023),
    arXiv:2312.00752, §4.1.1; Jing et al. (2019).
    """

    name: ClassVar[str] = "copying"
    stretch: ClassVar[str] = "noise"

    words: int = 8
    count: int = 4
    """Words told in a sequence."""
    noise: int = 12

    def __post_init__(self) -> None:
        """Check the sizes."""
        self._check_sizes(words=2, count=1, noise=0)

    @property
    def channels(self) -> tuple[int, ...]:
        """Words, blank and mark."""
        return (self.words + 2,)

    @property
    def outputs(self) -> int:
        """Words."""
        return self.words

    @property
    def length(self) -> int:
        """What is told, the blanks, and the marks."""
        return 2 * self.count + self.noise

    @property
    def chance(self) -> float:
        """One word in so many."""
        return 1 / self.words

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        """Draw so many sequences; each mark has a label."""
        told = self.count + self.noise
        place = distinct(count, told, self.count, generator).sort(1).values
        words = torch.randint(self.words, (count, self.count), generator=generator)
        inputs = torch.full((count, self.length), self.words)
        inputs[:, told:] = self.words + 1
        inputs.scatter_(1, place, words)
        labels = torch.full_like(inputs, IGNORED)
        labels[:, told:] = words
        return Batch(inputs, labels)
