"""Regression in context: vectors that are asked for, and a map that drifts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from innerloop.data.tasks.task import Batch, Task, permuted


class Drift(NamedTuple):
    """A truth that moves, and what it gives at random points."""

    x: Tensor
    """Points, ``[B, T, F]``."""
    y: Tensor
    """What is seen there, noise included, ``[B, T]``."""
    weights: Tensor
    """The truth at each time, ``[B, T, F]``."""


@dataclass(frozen=True, kw_only=True)
class DriftingRegression(Task):
    r"""A linear map that drifts; each token asks for its value at a new point, and tells what the last one was.

    .. math:: w_t = \sqrt{1 - \rho^2}\, w_{t-1} + \rho\, \epsilon_t, \qquad y_t = w_t^\top x_t / \sqrt{F} + \sigma n_t

    A token is (x_t, x_{t-1}, y_{t-1}), zeros before the first; its label is y_t without its noise. The drift is
    stationary, so the best answer that does not look is 0, whose mean square error is 1.
    """

    name: ClassVar[str] = "drift"
    stretch: ClassVar[str] = "points"

    width: int = 4
    """F."""
    points: int = 64
    drift: float = 0.1
    """rho, in [0, 1]."""
    noise: float = 0.1
    """sigma."""

    def __post_init__(self) -> None:
        """Check the sizes."""
        self._check_sizes(width=1, points=1)
        if not 0 <= self.drift <= 1 or not 0 <= self.noise < math.inf:
            raise ValueError("drift's drift must lie in [0, 1] and its noise be at least 0; "
                             f"got {self.drift} and {self.noise}")  # fmt: skip

    @property
    def channels(self) -> tuple[int, ...]:
        """None: inputs are vectors."""
        return ()

    @property
    def features(self) -> int:
        """A point, the last one, and what it gave."""
        return 2 * self.width + 1

    @property
    def outputs(self) -> int:
        """One number."""
        return 1

    @property
    def length(self) -> int:
        """As stated."""
        return self.points

    @property
    def chance(self) -> float:
        """Nothing explained."""
        return 0.0

    def stream(self, count: int, generator: torch.Generator) -> Drift:
        """Draw so many drifting truths and what they give."""
        shape = (count, self.points, self.width)
        x, step = (torch.randn(shape, generator=generator) for _ in range(2))
        weights = [step[:, 0]]
        for t in range(1, self.points):
            weights.append(math.sqrt(1 - self.drift**2) * weights[-1] + self.drift * step[:, t])
        w = torch.stack(weights, 1)
        seen = self.noise * torch.randn(shape[:2], generator=generator)
        return Drift(x, (w * x).sum(-1) / math.sqrt(self.width) + seen, w)

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        """Draw so many streams, ``[count, points, 2 F + 1]``, with a label at every token."""
        x, y, w = self.stream(count, generator)
        told = torch.cat((x, y[..., None]), -1)
        before = torch.cat((torch.zeros_like(told[:, :1]), told[:, :-1]), 1)
        return Batch(torch.cat((x, before), -1), (w * x).sum(-1, keepdim=True) / math.sqrt(self.width))


class Pairs(NamedTuple):
    """Random unit keys and what they were given."""

    k: Tensor
    """``[B, n, K]``."""
    v: Tensor
    """``[B, n, V]``, of mean square 1 a number."""


@dataclass(frozen=True, kw_only=True)
class Capacity(Task):
    """n pairs under n random unit keys, then every key once more, in any order; the answer is its value.

    A token is (key, value) while pairs are told and (key, zeros) when asked for. An additive memory errs by
    (n - 1) / K of the values' mean square: Dive into Deep Learning §12.4.1.1.
    """

    name: ClassVar[str] = "capacity"
    stretch: ClassVar[str] = ""

    pairs: int = 8
    key_width: int = 16
    value_width: int = 16

    def __post_init__(self) -> None:
        """Check the sizes."""
        self._check_sizes(pairs=1, key_width=1, value_width=1)

    @property
    def channels(self) -> tuple[int, ...]:
        """None: inputs are vectors."""
        return ()

    @property
    def features(self) -> int:
        """Key and value."""
        return self.key_width + self.value_width

    @property
    def outputs(self) -> int:
        """The value's width."""
        return self.value_width

    @property
    def length(self) -> int:
        """Told and asked."""
        return 2 * self.pairs

    @property
    def chance(self) -> float:
        """Nothing explained."""
        return 0.0

    def told(self, count: int, generator: torch.Generator) -> Pairs:
        """Draw so many lists of pairs."""
        k = torch.randn(count, self.pairs, self.key_width, generator=generator)
        v = torch.randn(count, self.pairs, self.value_width, generator=generator)
        return Pairs(torch.nn.functional.normalize(k, dim=-1), v)

    def draw(self, count: int, generator: torch.Generator) -> Batch:
        """Draw so many lists and questions, ``[count, 2 n, K + V]``; questions have labels."""
        k, v = self.told(count, generator)
        order = permuted(count, self.pairs, generator)[..., None]
        asked, right = k.gather(1, order.expand_as(k)), v.gather(1, order.expand_as(v))
        listed, questions = torch.cat((k, v), -1), torch.cat((asked, torch.zeros_like(v)), -1)
        return Batch(torch.cat((listed, questions), 1), torch.cat((torch.full_like(v, math.nan), right), 1))
