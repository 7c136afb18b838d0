r"""A layer as three choices, and the one loop that runs it.

.. math:: m_t = \arg\min_m \tfrac12 \sum_{i \le t} \gamma_i^{(t)} |v_i - m(k_i)|^2, \qquad o_t = m_t(q_t)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from innerloop.recipe.brute_force import optimum_reads
from innerloop.recipe.checks import check_gates, check_pairs, check_together, known_gates
from innerloop.recipe.memory import MLP, LinearMemory, Memory
from innerloop.recipe.solver import Fitter, RidgeFitter, Solver, Stepper
from innerloop.recipe.weights import Parameters, Past, QueryKernel, WeightedDecay, Weights, Window

Gates = Mapping[str, Tensor]


class RecipeState(NamedTuple):
    """All that a recipe carries from token to token."""

    parameters: Parameters
    """The memory's parameters, ``[B, G, ...]``; empty where every query asks for a fit of its own."""
    velocity: Parameters
    """What momentum carries, shaped like the parameters; empty for solvers without any."""
    past: Past | None
    """The pairs that still count, for solvers or weights that look back."""


@dataclass(frozen=True, repr=False)
class Recipe:
    r"""A sequence layer as the online solution of a regression.

    .. math:: m_t = \arg\min_m \tfrac12 \sum_{i \le t} \gamma_i^{(t)} |v_i - m(k_i)|^2, \qquad o_t = m_t(q_t)

    Each token fades the memory by the weights, writes its pair by the solver, then reads at its query. It is executed
    as stated, token by token, by autograd on the loss: slow, exact, and itself differentiable any number of times.
    Wang, Shi and Fox (2025), arXiv:2501.12352.

    Args:
        weights: Which past counts: ``Uniform ScalarDecay WeightedDecay ChannelDecay QueryKernel Window``.
        memory: What can be expressed: ``LinearMap FeatureMap MLP KernelSmoother``.
        solver: How hard to fit: ``CrossMoment GradientStep ImplicitStep Exact ConjugateGradients``.

    Raises:
        ValueError: If the three do not go together.

    Example:
        >>> import torch
        >>> from innerloop.recipe import GradientStep, LinearMap, Recipe, ScalarDecay
        >>> gated_delta_rule = Recipe(ScalarDecay(g=-0.1), LinearMap(), GradientStep(rate=0.5))
        >>> gated_delta_rule
        Recipe(ScalarDecay(g=-0.1), LinearMap(), GradientStep(rate=0.5))
        >>> q, k, v = (torch.randn(1, 5, 2, 4, dtype=torch.float64) for _ in range(3))
        >>> o, state = gated_delta_rule.run(q, k, v)
        >>> o.shape, state.parameters[0].shape
        (torch.Size([1, 5, 2, 4]), torch.Size([1, 2, 4, 4]))
    """

    weights: Weights
    memory: Memory
    solver: Solver

    def __post_init__(self) -> None:
        """Check that the three choices go together."""
        check_together(self.weights, self.memory, self.solver)

    def __repr__(self) -> str:
        """Print as one line."""
        return f"Recipe({self.weights!r}, {self.memory!r}, {self.solver!r})"

    def describe(self) -> tuple[str, str, str]:
        """Name the three choices, for a table.

        Returns:
            Weights, class and solver, a few words each.

        Example:
            >>> from innerloop.recipe import CrossMoment, LinearMap, Recipe, Uniform
            >>> Recipe(Uniform(), LinearMap(), CrossMoment()).describe()
            ('uniform', 'linear', 'least squares without the covariance')
        """
        return self.weights.words, self.memory.words, self.solver.words

    @property
    def gates(self) -> tuple[str, ...]:
        """The dotted paths of all fields that may change with every token."""
        return tuple(known_gates({"weights": self.weights, "solver": self.solver}))

    @property
    def _refits(self) -> bool:
        """Whether every token asks for a fit of the past instead of a step from where the memory stands."""
        if isinstance(self.solver, Stepper) and isinstance(self.solver, Fitter):
            return isinstance(self.weights, QueryKernel | Window | WeightedDecay)
        return isinstance(self.solver, Fitter)

    def start(self, *, parameters: Parameters) -> RecipeState:
        """Return the state before the first token, for a memory that starts elsewhere than at zero.

        Args:
            parameters: The memory's parameters, each ``[B, G, ...]``.

        Returns:
            A state for ``run`` or ``step``, with zero velocity and no past.

        Raises:
            ValueError: If the solver has no use for a start, or the shapes are not the memory's.

        Example:
            >>> import torch
            >>> from innerloop.recipe import GradientStep, MLP, Recipe, Uniform
            >>> recipe = Recipe(Uniform(), MLP((4, 8, 4), bias=False), GradientStep(rate=0.1))
            >>> state = recipe.start(parameters=(torch.randn(1, 2, 4, 8), torch.zeros(1, 2, 8, 4)))
            >>> o, state = recipe.run(*torch.randn(3, 1, 5, 2, 4), state=state)
        """
        parameters = tuple(parameters)
        if self._refits:
            raise ValueError(
                f"starting parameters are for a solver that takes steps, but {self.solver!r} fits the past alone; "
                "got some. Leave state unset, or use GradientStep or ImplicitStep."
            )
        if isinstance(self.memory, MLP):
            self.memory.check(parameters)
        elif len(parameters) != 1 or parameters[0].dim() != 4:
            raise ValueError(
                f"parameters of {self.memory!r} must be one tensor [B, G, K, V]; "
                f"got {[list(p.shape) for p in parameters]}. Add the missing axes, or leave state unset for zeros."
            )
        return RecipeState(parameters, self._rest(parameters), None)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *, gates: Gates | None = None, state: RecipeState | None = None
    ) -> tuple[Tensor, RecipeState]:
        """Run a sequence through the layer, token by token.

        Args:
            q: Queries, ``[B, T, G, K]``; one memory a batch row and head.
            k: Keys, ``[B, T, G, K]``.
            v: Values, ``[B, T, G, V]``.
            gates: Fields that change with every token, by dotted path: ``{"solver.rate": rate}`` with ``[B, T, G]``
                (``weights.g`` of a ChannelDecay ``[B, T, G, K]``). ``Recipe.gates`` lists those there are.
            state: Where a previous run or step ended, or ``start(...)``; an empty memory if omitted.

        Returns:
            What was read, ``[B, T, G, V]``, and the state after the last token.

        Raises:
            ValueError: If a shape or gate does not fit, a gate is missing, or an MLP is not given a start.
            TypeError: If the tensors are not all float32 or all float64.

        Example:
            >>> import torch
            >>> from innerloop.recipe import Exact, KernelSmoother, QueryKernel, Recipe
            >>> softmax_attention = Recipe(QueryKernel(), KernelSmoother(), Exact())
            >>> q, k, v = torch.randn(3, 1, 6, 2, 4, dtype=torch.float64)
            >>> o, state = softmax_attention.run(q, k, v)
            >>> score = torch.einsum("btgk,bsgk->bgts", q, k) + torch.full((6, 6), float("-inf")).triu(1)
            >>> torch.allclose(o, torch.einsum("bgts,bsgv->btgv", score.softmax(-1), v))
            True
        """
        given = self._given(q, k, v, gates, axes="B T G")
        state = self._begin(q[:, :0].transpose(1, 2), v[:, :0].transpose(1, 2)) if state is None else state
        outputs = []
        # unbind, not slices: the backward of T slices costs time quadratic in T.
        tokens = {path: gate.unbind(1) for path, gate in given.items()}
        for t, token in enumerate(zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True)):
            o, state = self._advance(*token, {path: gate[t] for path, gate in tokens.items()}, state)
            outputs.append(o)
        return torch.stack(outputs, dim=1) if outputs else torch.zeros_like(v), state

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, gates: Gates | None = None, state: RecipeState | None = None
    ) -> tuple[Tensor, RecipeState]:
        """Run one token through the layer.

        Args:
            q: The query, ``[B, G, K]``.
            k: The key, ``[B, G, K]``.
            v: The value, ``[B, G, V]``.
            gates: As in :meth:`run`, without T.
            state: As in :meth:`run`.

        Returns:
            What was read, ``[B, G, V]``, and the state after the token.

        Raises:
            ValueError: As in :meth:`run`.
            TypeError: As in :meth:`run`.

        Example:
            >>> import torch
            >>> from innerloop.recipe import ImplicitStep, LinearMap, Recipe, Uniform
            >>> longhorn = Recipe(Uniform(), LinearMap(), ImplicitStep(strength=float("inf")))
            >>> k, v = torch.randn(2, 1, 1, 4, dtype=torch.float64)
            >>> o, state = longhorn.step(k, k, v)
            >>> torch.allclose(o, v)  # an infinite strength stores the pair exactly
            True
        """
        given = self._given(q, k, v, gates, axes="B G")
        state = self._begin(q.unsqueeze(2), v.unsqueeze(2)) if state is None else state
        return self._advance(q, k, v, given, state)

    def fit_all(self, q: Tensor, k: Tensor, v: Tensor, *, gates: Gates | None = None) -> Tensor:
        r"""Solve the regression over the whole past anew for every token, by brute force.

        Stacks :math:`\sqrt{\gamma_i}\,\phi(k_i)` and, for a ridge, :math:`\sqrt{\mathrm{ridge}}\, I` into a design
        matrix and applies its pseudo-inverse; a kernel smoother is a plain weighted mean. It shares neither the weights
        nor the solution with :meth:`run`: an independent second opinion.

        Args:
            q: Queries, ``[B, T, G, K]``.
            k: Keys, ``[B, T, G, K]``.
            v: Values, ``[B, T, G, V]``.
            gates: As in :meth:`run`.

        Returns:
            What the optimum reads, ``[B, T, G, V]``.

        Raises:
            ValueError: If the solver seeks no optimum, or a weight is negative where a design matrix needs its root.
            TypeError: As in :meth:`run`.

        Example:
            >>> import torch
            >>> from innerloop.recipe import Exact, LinearMap, Recipe, ScalarDecay
            >>> recipe = Recipe(ScalarDecay(g=-0.1), LinearMap(), Exact(ridge=0.1))
            >>> q, k, v = torch.randn(3, 1, 6, 2, 4, dtype=torch.float64)
            >>> torch.allclose(recipe.run(q, k, v)[0], recipe.fit_all(q, k, v))
            True
        """
        if not isinstance(self.solver, RidgeFitter) or not isinstance(self.memory, LinearMemory):
            raise ValueError(
                f"fit_all needs a recipe that seeks the optimum over its past; got {self!r}. "
                "Use the solver Exact(), with a memory that is linear in its parameters."
            )
        given = self._given(q, k, v, gates, axes="B T G")
        ridge = given.get("solver.ridge", self.solver.ridge)
        assert ridge is not None
        return optimum_reads(self.weights.at(_fields(given, "weights")), self.memory, ridge, q, k, v)

    def _advance(self, q: Tensor, k: Tensor, v: Tensor, given: Gates, state: RecipeState) -> tuple[Tensor, RecipeState]:
        """Return what one token reads and the state it leaves: fade, write, read."""
        weights, solver = self.weights.at(_fields(given, "weights")), self.solver.at(_fields(given, "solver"))
        parameters, velocity, past = state
        if self._refits or isinstance(weights, Window):
            past = weights.remember(past, k, v)
        if self._refits:
            assert isinstance(solver, Fitter) and past is not None
            parameters = solver.fit(self.memory, past.k, past.v, weights.gamma(past, q))
        else:
            assert isinstance(solver, Stepper)
            keys, values = (past.k, past.v) if past is not None else (k.unsqueeze(2), v.unsqueeze(2))
            parameters, velocity = solver.move(self.memory, weights.fade(parameters), velocity, keys, values)
        o = self.memory(parameters, q.unsqueeze(2)).squeeze(2)
        return o, RecipeState(() if isinstance(weights, QueryKernel) else parameters, velocity, past)

    def _begin(self, k: Tensor, v: Tensor) -> RecipeState:
        """Return the state of an empty memory, for pairs of ``[B, G, N, .]``."""
        parameters = () if self._refits else self.memory.zeros(k, v)
        return RecipeState(parameters, self._rest(parameters), None)

    def _rest(self, parameters: Parameters) -> Parameters:
        """Return a velocity of zero, for a solver that has one."""
        moving = isinstance(self.solver, Stepper) and self.solver.has_velocity
        return tuple(torch.zeros_like(p) for p in parameters) if moving else ()

    def _given(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None, axes: str) -> dict[str, Tensor]:
        """Return the gates in the dtype of q, all inputs checked."""
        gates = gates or {}
        check_pairs(q, k, v, self.memory, axes)
        check_gates(gates, {"weights": self.weights, "solver": self.solver}, q)
        return {path: gate.to(q.dtype) for path, gate in gates.items()}


def _fields(given: Gates, family: str) -> dict[str, Tensor]:
    """Return the gates of one family, by the name of the field."""
    return {path.partition(".")[2]: gate for path, gate in given.items() if path.startswith(f"{family}.")}
