r"""Which past counts: the weights of the regression.

In :math:`m_t = \arg\min_m \tfrac12 \sum_{i \le t} \gamma_i^{(t)} |v_i - m(k_i)|^2` they are :math:`\gamma_i^{(t)}`.
A solver that refits asks for them; a solver that takes one step a token lets them fade the memory instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from innerloop.recipe.choice import Choice, Value, along, check_count, check_number

Parameters = tuple[Tensor, ...]
Kernel = Callable[[Tensor, Tensor], Tensor]


class Past(NamedTuple):
    """The pairs that still count.

    Log weights are only ever added to, never subtracted, so that ``-inf`` stays a clean zero.
    """

    k: Tensor
    """Keys, ``[B, G, N, K]``."""
    v: Tensor
    """Values, ``[B, G, N, V]``."""
    log_weights: Tensor
    """Logarithm of what has become of each pair's weight, ``[B, G, N]``."""
    entry: Tensor
    """Weight with which each pair entered, ``[B, G, N]``."""


class Weights(Choice):
    """Which past counts."""

    def fade(self, parameters: Parameters) -> Parameters:
        """Return the memory's parameters after one token's worth of forgetting."""
        return parameters

    def remember(self, past: Past | None, k: Tensor, v: Tensor) -> Past:
        """Return the past with one more pair, ``[B, G, .]``."""
        none = k.new_zeros(*k.shape[:2], 1)
        pair = Past(k.unsqueeze(2), v.unsqueeze(2), none, self._entry(none))
        if past is None:
            return pair
        return Past(*(torch.cat(two, dim=2) for two in zip(past, pair, strict=True)))

    def gamma(self, past: Past, q: Tensor) -> Tensor:
        """Return the weight of each pair for a query of ``[B, G, K]``: ``[B, G, N]``."""
        return past.entry * past.log_weights.exp()

    def _entry(self, like: Tensor) -> Tensor:
        """Return the weight with which the pairs of one token enter, ``[B, G, 1]``."""
        return torch.ones_like(like)

    def history(self, q: Tensor, k: Tensor) -> list[Tensor]:
        """Return the weights ``[B, G, t+1]`` of a whole sequence ``[B, T, G, K]``, one tensor a token.

        Written apart from :meth:`remember` and :meth:`gamma`: ``fit_all`` is a second opinion.
        """
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class Uniform(Weights):
    r"""Every pair counts alike, for ever: :math:`\gamma_i^{(t)} = 1`.

    Example:
        >>> from innerloop.recipe import CrossMoment, LinearMap, Recipe
        >>> linear_attention = Recipe(Uniform(), LinearMap(), CrossMoment())
        >>> o, state = linear_attention.step(*torch.ones(3, 1, 1, 2))
        >>> o.flatten()
        tensor([2., 2.])
    """

    @property
    def words(self) -> str:
        """The choice in a few words."""
        return "uniform"

    def history(self, q: Tensor, k: Tensor) -> list[Tensor]:
        """Return ones."""
        return [k.new_ones(k.shape[0], k.shape[2], t + 1) for t in range(k.shape[1])]


@dataclass(frozen=True, repr=False)
class ScalarDecay(Weights):
    r"""What is past counts less, by one factor a token.

    .. math:: \gamma_i^{(t)} = \exp(g_{i+1} + \dots + g_t)

    A solver that steps sees every parameter of the memory multiplied by :math:`e^{g_t}` before its step.

    Args:
        g: Natural log of the decay, at most 0, ``-inf`` forgets everything; a number, or a tensor ``[G]``. None if it
            comes with every token, as the gate ``weights.g`` ``[B, T, G]``.

    Raises:
        ValueError: If a number ``g`` is positive.

    Example:
        >>> from innerloop.recipe import CrossMoment, LinearMap, Recipe
        >>> mamba2 = Recipe(ScalarDecay(), LinearMap(), CrossMoment())
        >>> q, k, v = torch.ones(3, 1, 3, 1, 1)
        >>> mamba2.run(q, k, v, gates={"weights.g": torch.full((1, 3, 1), 0.5).log()})[0].flatten()
        tensor([1.0000, 1.5000, 1.7500])
    """

    g: Value = None
    gates: ClassVar = {"g": ("G",)}

    def __post_init__(self) -> None:
        """Check the decay."""
        check_number(self, "g", -math.inf, 0.0)

    @property
    def words(self) -> str:
        """The choice in a few words."""
        return "scalar decay"

    def fade(self, parameters: Parameters) -> Parameters:
        """Return every parameter times e^g."""
        return tuple(_exp(along(self.g, p)) * p for p in parameters)

    def remember(self, past: Past | None, k: Tensor, v: Tensor) -> Past:
        """Return the pairs faded, and the new one."""
        if past is not None:
            past = past._replace(log_weights=past.log_weights + along(self.g, past.log_weights))
        return super().remember(past, k, v)

    def history(self, q: Tensor, k: Tensor) -> list[Tensor]:
        """Return products of the decays after each pair, without a logarithm."""
        keep = (k.new_ones(k.shape[:3]) * _exp(self.g)).unbind(1)
        rows = [k.new_ones(k.shape[0], k.shape[2], 0)]
        for now in keep:
            rows.append(torch.cat([rows[-1] * now.unsqueeze(-1), torch.ones_like(now).unsqueeze(-1)], dim=-1))
        return rows[1:]


@dataclass(frozen=True, repr=False)
class WeightedDecay(ScalarDecay):
    r"""What is past counts less by one factor a token, and each pair enters with a weight of its own.

    .. math:: \gamma_i^{(t)} = w_i \exp(g_{i+1} + \dots + g_t)

    It weighs the pairs of a fit, so it goes with a solver that refits; a solver that steps has a rate for it.

    Args:
        g: As in :class:`ScalarDecay`.
        weight: What a pair counts when it enters, at least 0; a number, or a tensor ``[G]``. None if it comes with
            every token, as the gate ``weights.weight`` ``[B, T, G]``.

    Raises:
        ValueError: If a number ``g`` is positive, or a number ``weight`` negative.

    Example:
        >>> from innerloop.recipe import Exact, LinearMap, Recipe
        >>> recipe = Recipe(WeightedDecay(g=0.0, weight=None), LinearMap(), Exact(ridge=1.0))
        >>> q, k, v = torch.ones(3, 1, 3, 1, 1)
        >>> recipe.run(q, k, v, gates={"weights.weight": torch.tensor([[[1.0], [0.0], [2.0]]])})[0].flatten()
        tensor([0.5000, 0.5000, 0.7500])
    """

    weight: Value = 1.0
    gates: ClassVar = {"g": ("G",), "weight": ("G",)}

    def __post_init__(self) -> None:
        """Check decay and weight."""
        super().__post_init__()
        check_number(self, "weight", 0.0)

    @property
    def words(self) -> str:
        """The choice in a few words."""
        return "scalar decay, each pair weighted"

    def _entry(self, like: Tensor) -> Tensor:
        return torch.ones_like(like) * along(self.weight, like)

    def history(self, q: Tensor, k: Tensor) -> list[Tensor]:
        """Return products of the decays after each pair, times its weight."""
        assert self.weight is not None
        entry = (k.new_ones(k.shape[:3]) * self.weight).transpose(1, 2)  # [B, G, T]
        return [row * entry[..., : row.shape[-1]] for row in super().history(q, k)]


@dataclass(frozen=True, repr=False)
class ChannelDecay(Weights):
    r"""Each key channel of a linear map fades at its own pace.

    .. math:: S \leftarrow \mathrm{diag}(e^{g_t})\, S

    It fades the memory, not the pairs, so it goes with a :class:`LinearMap` and a solver that steps.

    Args:
        g: Natural log of the decay, at most 0; a number, or a tensor ``[G, K]``. None if it comes with every token,
            as the gate ``weights.g`` ``[B, T, G, K]``.

    Raises:
        ValueError: If a number ``g`` is positive.

    Example:
        >>> from innerloop.recipe import CrossMoment, LinearMap, Recipe
        >>> gla = Recipe(ChannelDecay(torch.tensor([[0.0, -math.inf]])), LinearMap(), CrossMoment())
        >>> q, k, v = torch.ones(3, 1, 3, 1, 2)
        >>> gla.run(q, k, v)[0][0, :, 0, 0]  # the first channel sums, the second keeps the newest
        tensor([2., 3., 4.])
    """

    g: Value = None
    gates: ClassVar = {"g": ("G K",)}

    def __post_init__(self) -> None:
        """Check the decay."""
        check_number(self, "g", -math.inf, 0.0)

    @property
    def words(self) -> str:
        """The choice in a few words."""
        return "channel decay"

    def fade(self, parameters: Parameters) -> Parameters:
        """Return the map, its row c times e^(g_c)."""
        (state,) = parameters
        return (_exp(self.g.to(state.dtype).unsqueeze(-1) if isinstance(self.g, Tensor) else self.g) * state,)


@dataclass(frozen=True, repr=False)
class Window(Weights):
    r"""Only the last pairs count: :math:`\gamma_i^{(t)} = 1` for the newest ``size`` pairs, else 0.

    A solver that steps takes its step on the sum of their losses.

    Args:
        size: Number of pairs, the newest among them.

    Raises:
        ValueError: If ``size`` is not a whole number of at least 1.

    Example:
        >>> from innerloop.recipe import CrossMoment, LinearMap, Recipe
        >>> q, k, v = torch.ones(3, 1, 4, 1, 1)
        >>> Recipe(Window(2), LinearMap(), CrossMoment()).run(q, k, v)[0].flatten()
        tensor([1., 2., 2., 2.])
    """

    size: int

    def __post_init__(self) -> None:
        """Check the size."""
        check_count(self, "size")

    @property
    def words(self) -> str:
        """The choice in a few words."""
        return f"last {self.size}"

    def remember(self, past: Past | None, k: Tensor, v: Tensor) -> Past:
        """Return the past with the new pair and without the oldest."""
        return Past(*(part[:, :, -self.size :] for part in super().remember(past, k, v)))

    def history(self, q: Tensor, k: Tensor) -> list[Tensor]:
        """Return zeros, then ``size`` ones."""
        ones = k.new_ones(k.shape[0], k.shape[2], k.shape[1])
        age = torch.arange(k.shape[1], device=k.device).flip(0)
        recent = ones * (age < self.size)
        return [recent[..., k.shape[1] - t - 1 :] for t in range(k.shape[1])]


def exponential(q: Tensor, k: Tensor) -> Tensor:
    r"""Softmax attention's kernel, :math:`e^{q^\top k_i}` relative to the largest of them.

    Dividing all weights by one number changes no weighted fit; a ridge is counted against a largest weight of 1.

    Args:
        q: A query, ``[B, G, 1, K]``.
        k: Keys, ``[B, G, N, K]``.

    Returns:
        Weights ``[B, G, N]``, at most 1.

    Example:
        >>> exponential(torch.ones(1, 1, 1, 2), torch.tensor([[[[0.0, 0.0], [1.0, 0.0]]]]))
        tensor([[[0.3679, 1.0000]]])
    """
    score = (q * k).sum(-1)
    return (score - score.amax(-1, keepdim=True)).exp()


def dot(q: Tensor, k: Tensor) -> Tensor:
    r"""Linear attention's kernel, :math:`q^\top k_i`; meant for features that are not negative.

    Args:
        q: A query, ``[B, G, 1, K]``.
        k: Keys, ``[B, G, N, K]``.

    Returns:
        Weights ``[B, G, N]``.

    Example:
        >>> dot(torch.ones(1, 1, 1, 2), torch.tensor([[[[0.0, 0.0], [1.0, 0.0]]]]))
        tensor([[[0., 1.]]])
    """
    return (q * k).sum(-1)


@dataclass(frozen=True, repr=False)
class QueryKernel(Weights):
    r"""A pair counts by the likeness of its key to the query: :math:`\gamma_i^{(t)} = \kappa(q_t, k_i)`.

    With a :class:`KernelSmoother` this is the Nadaraya-Watson estimator: softmax attention under
    :func:`exponential`, normalized linear attention under :func:`dot`. With a :class:`LinearMap` it is local linear
    regression. Every query asks for a fit of its own, so the solver must be one that refits.

    Args:
        kernel: Function of a query ``[B, G, 1, K]`` and keys ``[B, G, N, K]`` that returns ``[B, G, N]``.

    Raises:
        ValueError: If ``kernel`` cannot be called.

    Example:
        >>> from innerloop.recipe import Exact, KernelSmoother, Recipe
        >>> def gaussian(q, k):
        ...     return (-0.5 * (q - k).square().sum(-1)).exp()
        >>> smoother = Recipe(QueryKernel(gaussian), KernelSmoother(), Exact())
        >>> k = torch.tensor([0.0, 9.0]).reshape(1, 2, 1, 1)
        >>> smoother.run(k, k, k + 1)[0].flatten()  # at each key, its own value
        tensor([ 1., 10.])
    """

    kernel: Kernel = exponential

    def __post_init__(self) -> None:
        """Check the kernel.

        Raises:
            ValueError: If it cannot be called.
        """
        if not callable(self.kernel):
            raise ValueError(
                f"QueryKernel.kernel must be a function of (q, k); got {self.kernel!r}. "
                "Use innerloop.recipe.exponential or innerloop.recipe.dot, or write one."
            )

    @property
    def words(self) -> str:
        """The choice in a few words."""
        return "query kernel"

    def gamma(self, past: Past, q: Tensor) -> Tensor:
        """Return the kernel between the query and every key."""
        return self.kernel(q.unsqueeze(2), past.k)

    def history(self, q: Tensor, k: Tensor) -> list[Tensor]:
        """Return the kernel between each query and the keys up to it."""
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        return [self.kernel(q[:, :, t : t + 1], k[:, :, : t + 1]) for t in range(k.shape[2])]


def _exp(log: Value) -> float | Tensor:
    if isinstance(log, Tensor):
        return log.exp()
    assert log is not None, "Recipe checks that every field has a value before the loop starts"
    return math.exp(log)
