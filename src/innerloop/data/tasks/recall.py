"""Recall: pairs are listed, some are replaced, and keys are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from innerloop.data.tasks.task import IGNORED, Batch, Task, distinct, permuted


@dataclass(frozen=True, kw_only=True)
class OverwriteRecall(Task):
    """Every key is bound ``writes`` times in shuffled order, then each is asked for the value it was bound to last.

    A token has two channels, a key and a content, so that a model can make its addresses of keys alone: one that may
    look at both gives every pair an address of its own, and nothing is overwritten. The content of a question is the
    token ``values``. Dive into Deep Learning §12.5.1.1.

    Example:
        >>> import torch
        >>> from innerloop.data.tasks import OverwriteRecall
        >>> task = OverwriteRecall(keys=2, values=3, writes=2)
        >>> inputs, labels = task.draw(1, torch.Generator().manual_seed(0))
        >>> inputs[0].T.tolist(), labels[0].tolist()
        ([[0, 1, 1, 0, 0, 1], [1, 0, 2, 2, 3, 3]], [-100, -100, -100, -100, 2, 2])
    """

    name: ClassVar[str] = "overwrite"
    stretch: ClassVar[str] = "writes"

    keys: int = 8
    values: int = 16
    writes: int = 4
    """Of each key."""

    def __post_init__(self) -> None:
        """Check the sizes."""
        self._check_sizes(keys=1, values=2, writes=1)

    @property
    def channels(self) -> tuple[int, ...]:
        """Keys, and values with the question's content."""
        return self.keys, self.values + 1

    @property
    def outputs(self) -> int:
        """Values."""
        return self.values

    @property
    def length(self) -> int:
        """Writes and questions."""
        return self.keys * (self.writes + 1)

    @property
    def chance(self) -> float:
        """One value in so many."""
        return 1 / self.values

    @property
    def shortcut(self) -> float:
        """One of the key's own values: the last one, and every other that happens to be equal."""
        return 1 / self.writes + (1 - 1 / self.writes) / self.values

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        """Draw so many sequences: ``[count, T, 2]`` and the latest values."""
        total = self.keys * self.writes
        k = torch.arange(self.keys).repeat(self.writes)[permuted(count, total, generator)]
        v = torch.randint(self.values, (count, total), generator=generator)
        asked = permuted(count, self.keys, generator)
        place = torch.arange(1, total + 1) * (k[:, None] == asked[..., None])  # [B, keys, T]
        latest = v.gather(1, place.argmax(-1))
        keys = torch.cat((k, asked), 1)
        contents = torch.cat((v, torch.full_like(asked, self.values)), 1)
        labels = torch.cat((torch.full_like(v, IGNORED), latest), 1)
        return Batch(torch.stack((keys, contents), -1), labels)


@dataclass(frozen=True, kw_only=True)
class AssociativeRecall(Task):
    """A list of keys and their values, then one of the keys; the answer is its value.

    Keys are the tokens below ``keys``, values those behind them. NL-3 aside, Training a HOPE block; the task is that of
    Ba et al. (2016), arXiv:1610.06258.
    """

    name: ClassVar[str] = "recall"
    stretch: ClassVar[str] = ""

    keys: int = 8
    values: int = 12
    pairs: int = 4

    def __post_init__(self) -> None:
        """Check the sizes."""
        self._check_sizes(keys=1, values=2, pairs=1)
        if self.pairs > self.keys:
            raise ValueError(f"recall's pairs must be at most its keys={self.keys}, each listed once; got {self.pairs}")

    @property
    def channels(self) -> tuple[int, ...]:
        """Keys and values."""
        return (self.keys + self.values,)

    @property
    def outputs(self) -> int:
        """Values."""
        return self.values

    @property
    def length(self) -> int:
        """The list and the question."""
        return 2 * self.pairs + 1

    @property
    def chance(self) -> float:
        """One value in so many."""
        return 1 / self.values

    @property
    def shortcut(self) -> float:
        """One of the values listed."""
        return 1 / self.pairs + (1 - 1 / self.pairs) / self.values

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        """Draw so many sequences ``[count, 2 * pairs + 1]``; the last token alone has a label."""
        keys = distinct(count, self.keys, self.pairs, generator)
        values = torch.randint(self.values, (count, self.pairs), generator=generator)
        asked = torch.randint(self.pairs, (count, 1), generator=generator)
        listed = torch.stack((keys, values + self.keys), -1).flatten(1)
        labels = torch.full((count, self.length), IGNORED)
        labels[:, -1:] = values.gather(1, asked)
        return Batch(torch.cat((listed, keys.gather(1, asked)), 1), labels)


@dataclass(frozen=True, kw_only=True)
class MultiQueryRecall(Task):
    r"""Pairs are listed, then every key comes up once more among other tokens, sooner with a heavier head.

    Keys are the tokens in [1, vocabulary / 2), values those in [vocabulary / 2, vocabulary); the gaps between the list
    and the questions are drawn from :math:`p(n) \propto n^{a-1}`, without repetition. What is left over holds tokens
    drawn from all. As the generator of Arora et al. (2023), arXiv:2312.04927 (Zoology) draws them, save that labels are
    numbers of values, and that ``blank`` leaves the rest at token 0.
    """

    name: ClassVar[str] = "mqar"
    stretch: ClassVar[str] = "tokens"

    pairs: int = 8
    vocabulary: int = 64
    tokens: int = 64
    """Of a sequence, even; the list takes two a pair, and so do the questions at least."""
    tail: float = 0.01
    """a, of the gaps."""
    blank: bool = False

    def __post_init__(self) -> None:
        """Check the sizes."""
        self._check_sizes(pairs=1, vocabulary=4, tokens=4)
        if self.tokens % 2 or self.tokens < 4 * self.pairs:
            raise ValueError(f"mqar's tokens must be even and at least 4 * pairs = {4 * self.pairs}; got {self.tokens}")
        if self.pairs > self.vocabulary // 2 - 1:
            raise ValueError(f"mqar's pairs must be at most vocabulary / 2 - 1 = {self.vocabulary // 2 - 1} keys; "
                             f"got {self.pairs}")  # fmt: skip
        if not self.tail > 0:
            raise ValueError(f"mqar's tail must be above 0; got {self.tail}")

    @property
    def channels(self) -> tuple[int, ...]:
        """The vocabulary."""
        return (self.vocabulary,)

    @property
    def outputs(self) -> int:
        """Values."""
        return self.vocabulary - self.vocabulary // 2

    @property
    def length(self) -> int:
        """As stated."""
        return self.tokens

    @property
    def chance(self) -> float:
        """One value in so many."""
        return 1 / self.outputs

    @property
    def shortcut(self) -> float:
        """One of the values listed, which differ."""
        return 1 / self.pairs

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        """Draw so many sequences ``[count, tokens]``; each question has a label."""
        half, listed = self.vocabulary // 2, 2 * self.pairs
        keys = 1 + distinct(count, half - 1, self.pairs, generator)
        values = distinct(count, self.outputs, self.pairs, generator)
        space = (self.tokens - listed) // 2
        weight = torch.arange(1, space + 1, dtype=torch.float64) ** (self.tail - 1)
        gaps = torch.multinomial(weight.expand(count, -1), self.pairs, generator=generator)
        place = listed + 2 * gaps
        inputs = torch.zeros(count, self.tokens, dtype=torch.int64)
        if not self.blank:
            inputs = torch.randint(self.vocabulary, inputs.shape, generator=generator)
        inputs[:, :listed] = torch.stack((keys, half + values), -1).flatten(1)
        inputs.scatter_(1, place, keys)
        labels = torch.full_like(inputs, IGNORED).scatter_(1, place, values)
        return Batch(inputs, labels)


@dataclass(frozen=True, kw_only=True)
class Needle(Task):
    """One pair, then ``distance`` tokens of noise, then its key; the answer is its value.

    Keys are the tokens below ``keys``, values those behind them, noise the ``noise`` tokens behind those.
    """

    name: ClassVar[str] = "needle"
    stretch: ClassVar[str] = "distance"

    keys: int = 8
    values: int = 16
    noise: int = 16
    distance: int = 32

    def __post_init__(self) -> None:
        """Check the sizes."""
        self._check_sizes(keys=1, values=2, noise=1, distance=0)

    @property
    def channels(self) -> tuple[int, ...]:
        """Keys, values and noise."""
        return (self.keys + self.values + self.noise,)

    @property
    def outputs(self) -> int:
        """Values."""
        return self.values

    @property
    def length(self) -> int:
        """The pair, the noise and the question."""
        return self.distance + 3

    @property
    def chance(self) -> float:
        """One value in so many."""
        return 1 / self.values

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        """Draw so many sequences; the last token alone has a label."""

        def tokens(first: int, many: int, width: int) -> Tensor:
            return first + torch.randint(many, (count, width), generator=generator)

        key, value = tokens(0, self.keys, 1), tokens(self.keys, self.values, 1)
        noise = tokens(self.keys + self.values, self.noise, self.distance)
        labels = torch.full((count, self.length), IGNORED)
        labels[:, -1:] = value - self.keys
        return Batch(torch.cat((key, value, noise, key), 1), labels)
