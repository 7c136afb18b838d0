r"""How hard to fit, once per token: from a single gradient step to the optimum.

Every derivative in here is taken by autograd on the stated objective; no update rule is written by hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from innerloop.algebra.conjugate_gradients import conjugate_gradients
from innerloop.recipe.choice import Choice, Value, along, check_count, check_number
from innerloop.recipe.memory import Memory
from innerloop.recipe.objective import Loss, alignment, by_row, gradient, squared_error
from innerloop.recipe.weights import Parameters


class Solver(Choice):
    """How hard to fit."""

    needs_optimum: ClassVar[bool] = True
    """Whether the memory must be linear in its parameters."""


class Stepper(Solver):
    """A solver that moves the memory a little with every token."""

    needs_optimum = False
    has_velocity: ClassVar[bool] = False

    def move(
        self, memory: Memory, parameters: Parameters, velocity: Parameters, k: Tensor, v: Tensor
    ) -> tuple[Parameters, Parameters]:
        """Return parameters and velocity after a step on N pairs, ``[B, G, N, .]``."""
        raise NotImplementedError


class Fitter(Solver):
    """A solver that fits the whole past afresh after every token."""

    def fit(self, memory: Memory, k: Tensor, v: Tensor, gamma: Tensor) -> Parameters:
        """Return parameters for N pairs ``[B, G, N, .]`` that count by ``gamma`` ``[B, G, N]``."""
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class GradientStep(Stepper):
    r"""One gradient step a token, with momentum and decoupled weight decay.

    .. math:: U \leftarrow \eta U - \theta \nabla \ell(W), \qquad W \leftarrow (1 - \alpha) W + U

    The gradient is that of the memory before its decay. On a linear map, with the default loss, no momentum and no
    decay, this is the delta rule of Widrow and Hoff with rate theta; on an MLP it is the memory of Titans.
    Behrouz et al. (2025), arXiv:2501.00663.

    Args:
        rate: theta, the size of the step; gate ``solver.rate``.
        momentum: eta, what stays of the past velocity, which starts at zero; gate ``solver.momentum``.
        decay: alpha, what is forgotten; gate ``solver.decay``. Each of the three is a number, a tensor ``[G]``, or
            None if it comes with every token, as a gate ``[B, T, G]``.
        steps: How often the step is repeated on the same pair.
        loss: Function of prediction and target ``[..., V]`` that returns one number a row, summed over V.

    Raises:
        ValueError: If a number is out of range or the loss cannot be called.

    Example:
        >>> from innerloop.recipe import LinearMap, Recipe, Uniform
        >>> titans_linear = Recipe(Uniform(), LinearMap(), GradientStep(rate=0.1, momentum=0.5, decay=0.2))
        >>> q, k, v = torch.ones(3, 1, 3, 1, 1)
        >>> titans_linear.run(q, k, v)[0].flatten()
        tensor([0.1000, 0.2200, 0.3240])
    """

    rate: Value = 1.0
    momentum: Value = 0.0
    decay: Value = 0.0
    steps: int = 1
    loss: Loss = squared_error
    gates: ClassVar = {"rate": ("G",), "momentum": ("G",), "decay": ("G",)}
    has_velocity: ClassVar = True

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            ValueError: If one is out of range.
        """
        check_number(self, "rate", -math.inf)
        check_number(self, "momentum", -math.inf)
        check_number(self, "decay", 0.0, 1.0)
        check_count(self, "steps")
        if not callable(self.loss):
            raise ValueError(
                f"GradientStep.loss must be a function of (prediction, target); got {self.loss!r}. "
                "Use innerloop.recipe.squared_error, or write one that returns a number a row."
            )

    @property
    def words(self) -> str:
        """The choice in a few words."""
        count = "gradient step" if self.steps == 1 else f"{self.steps} gradient steps"
        extras = [name for name in ("momentum", "decay") if not _is_zero(getattr(self, name))]
        return f"{count} with {' and '.join(extras)}" if extras else count

    def move(
        self, memory: Memory, parameters: Parameters, velocity: Parameters, k: Tensor, v: Tensor
    ) -> tuple[Parameters, Parameters]:
        """Return where ``steps`` steps lead."""
        for _ in range(self.steps):
            slope = gradient(lambda inner: by_row(self.loss, memory(inner, k), v).sum(), parameters)
            velocity = tuple(
                along(self.momentum, u) * u - along(self.rate, g) * g for u, g in zip(velocity, slope, strict=True)
            )
            parameters = tuple((1 - along(self.decay, w)) * w + u for w, u in zip(parameters, velocity, strict=True))
        return parameters, velocity


@dataclass(frozen=True, repr=False)
class ImplicitStep(Stepper):
    r"""Move to where the new pair and the old memory are in balance: a proximal step.

    .. math:: s \leftarrow \arg\min_s |s - s'|^2 + \beta\, |m_s(k) - v|^2

    On a memory that is linear in its parameters this is the exact minimum; the delta rule's form with rate
    :math:`\beta / (1 + \beta |k|^2)` for a linear map. On any other it is the minimum for the memory linearised at s',
    a Gauss-Newton step. At beta = 0 nothing changes, at infinity the pair is stored exactly, and a zero key writes
    nothing. Liu et al. (2024), arXiv:2407.14207, before their diagonal approximation.

    Args:
        strength: beta in [0, inf]; a number, a tensor ``[G]``, or None if it comes with every token, as the gate
            ``solver.strength`` ``[B, T, G]``.
        steps: How often the step is repeated on the same pair, each time from the new memory.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> from innerloop.recipe import LinearMap, Recipe, Uniform
        >>> q, k, v = torch.ones(3, 1, 3, 1, 1)
        >>> Recipe(Uniform(), LinearMap(), ImplicitStep(strength=1.0)).run(q, k, v)[0].flatten()
        tensor([0.5000, 0.7500, 0.8750])
    """

    strength: Value = 1.0
    steps: int = 1
    gates: ClassVar = {"strength": ("G",)}

    def __post_init__(self) -> None:
        """Check the fields."""
        check_number(self, "strength", 0.0)
        check_count(self, "steps")

    @property
    def words(self) -> str:
        """The choice in a few words."""
        return "implicit step" if self.steps == 1 else f"{self.steps} implicit steps"

    def move(
        self, memory: Memory, parameters: Parameters, velocity: Parameters, k: Tensor, v: Tensor
    ) -> tuple[Parameters, Parameters]:
        """Return the balance, solved for in the space of predictions, which is small."""
        for _ in range(self.steps):
            slope = _jacobian(memory, parameters, k, v)  # [B, G, N V, P]
            error = (memory(parameters, k) - v).flatten(2).unsqueeze(-1)  # [B, G, N V, 1]
            change = slope.mT @ self._damped_inverse(slope @ slope.mT) @ error  # [B, G, P, 1]
            pieces = change.squeeze(-1).split([p[0, 0].numel() for p in parameters], dim=-1)
            parameters = tuple(p - piece.reshape(p.shape) for p, piece in zip(parameters, pieces, strict=True))
        return parameters, velocity

    def _damped_inverse(self, gram: Tensor) -> Tensor:
        """Return (I / beta + gram)^+, as s (r I + s gram)^+ with s = min(beta, 1), r = min(1 / beta, 1).

        Nothing in this form overflows or is 0/0 anywhere in [0, inf]; the pseudo-inverse serves beta = inf with a gram
        matrix that is singular.
        """
        beta = torch.as_tensor(self.strength, dtype=gram.dtype, device=gram.device)
        strong = beta > 1
        small = along(torch.where(strong, 1.0, beta), gram)
        rest = along(torch.where(strong, 1 / torch.where(strong, beta, 1.0), 1.0), gram)
        identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        return small * torch.linalg.pinv(rest * identity + small * gram, hermitian=True)


@dataclass(frozen=True, repr=False)
class CrossMoment(Stepper, Fitter):
    r"""Least squares without the covariance: the weighted solution with :math:`(K^\top \Gamma K)^{-1}` deleted.

    .. math:: S_t = \sum_{i \le t} \gamma_i^{(t)} k_i v_i^\top

    This is a gradient step of rate 1 on the loss :math:`-\langle m(k), v \rangle`, and what linear attention, RetNet,
    GLA and Mamba-2 have in common. Wang, Shi and Fox (2025), arXiv:2501.12352.

    Example:
        >>> from innerloop.recipe import LinearMap, Recipe, Uniform
        >>> q, k, v = torch.ones(3, 1, 3, 1, 1)
        >>> Recipe(Uniform(), LinearMap(), CrossMoment()).run(q, k, v)[0].flatten()
        tensor([1., 2., 3.])
    """

    needs_optimum: ClassVar = True

    @property
    def words(self) -> str:
        """The choice in a few words."""
        return "least squares without the covariance"

    def move(
        self, memory: Memory, parameters: Parameters, velocity: Parameters, k: Tensor, v: Tensor
    ) -> tuple[Parameters, Parameters]:
        """Return the sum with the new pair."""
        slope = gradient(lambda inner: alignment(memory(inner, k), v).sum(), parameters)
        return tuple(w - g for w, g in zip(parameters, slope, strict=True)), velocity

    def fit(self, memory: Memory, k: Tensor, v: Tensor, gamma: Tensor) -> Parameters:
        """Return the whole sum, where weights other than a decay call for it."""
        slope = gradient(lambda inner: (gamma * alignment(memory(inner, k), v)).sum(), memory.zeros(k, v))
        return tuple(-g for g in slope)


class RidgeFitter(Fitter):
    """A solver of the weighted ridge problem; what its two members share is the objective."""

    ridge: Value
    gates: ClassVar = {"ridge": ("G", "G F")}

    def ridge_on(self, state: Tensor) -> float | Tensor:
        """Return the ridge aligned with parameters of ``[B, G, F, V]``."""
        if isinstance(self.ridge, Tensor) and self.ridge.dim() == 3:  # [B, G, F]
            return self.ridge.unsqueeze(-1)
        return along(self.ridge, state)

    def slope(self, memory: Memory, state: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
        r"""Return the slope of :math:`\sum \gamma_i \tfrac12 |v_i - m(k_i)|^2 + \tfrac12 \mathrm{ridge}\, |W|^2`."""
        ridge = self.ridge_on(memory.zeros(k, v)[0])

        def objective(inner: Parameters) -> Tensor:
            return (gamma * squared_error(memory(inner, k), v)).sum() + (ridge * 0.5 * inner[0].square()).sum()

        return gradient(objective, (state,))[0]

    def hessian(self, memory: Memory, k: Tensor, gamma: Tensor) -> Tensor:
        """Return the second derivative by one channel of the value, ``[B, G, F, F]``: it is the same for each.

        With targets of 0 the objective is purely quadratic, so its slope at the unit vector c is row c.
        """
        target = torch.zeros_like(k[..., :1])
        width = memory.zeros(k, target)[0].shape[2]
        units = torch.eye(width, dtype=k.dtype, device=k.device).reshape(width, 1, 1, width, 1)
        rows = self.slope(memory, units.expand(width, *k.shape[:2], width, 1), k, target, gamma)
        return rows.squeeze(-1).permute(1, 2, 0, 3)


@dataclass(frozen=True, repr=False)
class Exact(RidgeFitter):
    r"""The optimum over the whole past, after every token.

    .. math:: \arg\min_W \tfrac12 \sum_{i \le t} \gamma_i^{(t)} |v_i - m_W(k_i)|^2 + \tfrac12 \mathrm{ridge}\, |W|^2

    One Newton step from zero, which is exact for a memory linear in its parameters. Where many optima exist (no ridge,
    few pairs) it takes the one of least norm; a direction whose curvature is lost in rounding counts as free.

    Args:
        ridge: What large parameters cost, at least 0; or None if it comes with every token, as the gate
            ``solver.ridge`` of ``[B, T, G]`` or, one for each feature, ``[B, T, G, F]``.

    Raises:
        ValueError: If a number ``ridge`` is negative.

    Example:
        >>> from innerloop.recipe import LinearMap, Recipe, Uniform
        >>> q, k, v = torch.ones(3, 1, 3, 1, 1)
        >>> Recipe(Uniform(), LinearMap(), Exact(ridge=1.0)).run(q, k, v)[0].flatten()
        tensor([0.5000, 0.6667, 0.7500])
    """

    ridge: Value = 0.0

    def __post_init__(self) -> None:
        """Check the ridge."""
        check_number(self, "ridge", 0.0)

    @property
    def words(self) -> str:
        """The choice in a few words."""
        return "exact" if _is_zero(self.ridge) else "exact with ridge"

    def fit(self, memory: Memory, k: Tensor, v: Tensor, gamma: Tensor) -> Parameters:
        """Return where the Newton step leads."""
        (zeros,) = memory.zeros(k, v)
        inverse = torch.linalg.pinv(self.hessian(memory, k, gamma), hermitian=True)
        return (-inverse @ self.slope(memory, zeros, k, v, gamma),)


@dataclass(frozen=True, repr=False)
class ConjugateGradients(RidgeFitter):
    r"""The objective of :class:`Exact`, solved by a stated number of conjugate-gradient steps.

    Start and preconditioner are Jacobi's: the diagonal of the second derivative. With at least F iterations it agrees
    with :class:`Exact` up to rounding. Von Oswald et al. (2025), arXiv:2506.05233.

    Args:
        iterations: Number of steps.
        ridge: What large parameters cost, above 0; or None if it comes with every token, as the gate
            ``solver.ridge`` of ``[B, T, G]`` or, one for each feature, ``[B, T, G, F]``.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> from innerloop.recipe import LinearMap, Recipe, Uniform
        >>> q, k, v = torch.ones(3, 1, 3, 1, 1)
        >>> Recipe(Uniform(), LinearMap(), ConjugateGradients(iterations=1)).run(q, k, v)[0].flatten()
        tensor([0.5000, 0.6667, 0.7500])
    """

    iterations: int = 30
    ridge: Value = 1.0

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            ValueError: If one is out of range.
        """
        check_count(self, "iterations")
        check_number(self, "ridge", 0.0)
        if _is_zero(self.ridge):
            raise ValueError(
                "ConjugateGradients.ridge must be above 0, for the steps need a definite problem; got 0. "
                "Use Exact(), which takes the solution of least norm."
            )

    @property
    def words(self) -> str:
        """The choice in a few words."""
        return f"{self.iterations} conjugate gradients with ridge"

    def fit(self, memory: Memory, k: Tensor, v: Tensor, gamma: Tensor) -> Parameters:
        """Return where the steps lead, all channels of the value side by side."""
        (zeros,) = memory.zeros(k, v)
        diagonal = self.hessian(memory, k, gamma).diagonal(dim1=-2, dim2=-1).unsqueeze(2)
        rhs = -self.slope(memory, zeros, k, v, gamma).mT  # [B, G, V, F]

        def product(x: Tensor) -> Tensor:
            # With targets of 0 the slope is the second derivative times x.
            return self.slope(memory, x.mT, k, torch.zeros_like(v), gamma).mT

        return (conjugate_gradients(product, rhs, iterations=self.iterations, diagonal=diagonal).mT,)


def _jacobian(memory: Memory, parameters: Parameters, k: Tensor, v: Tensor) -> Tensor:
    """Return all predictions differentiated by all parameters, ``[B, G, N V, P]``: a copy of the memory for each."""
    pairs, width = v.shape[2:]
    count = pairs * width
    pick = torch.eye(count, dtype=k.dtype, device=k.device).reshape(count, 1, 1, pairs, width)
    copies = tuple(p.expand(count, *p.shape) for p in parameters)
    slopes = gradient(lambda inner: (pick * memory(inner, k)).sum(), copies)
    return torch.cat([slope.flatten(3) for slope in slopes], dim=-1).permute(1, 2, 0, 3)


def _is_zero(value: Value) -> bool:
    return isinstance(value, int | float) and value == 0
