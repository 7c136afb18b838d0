r"""A layer as three choices, and the one loop that runs it.

.. math:: m_t = \arg\min_m \tfrac12 \sum_{i \le t} \gamma_i^{(t)} |v_i - m(k_i)|^2, \qquad o_t = m_t(q_t)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from innerloop.recipe.memory import MLP, KernelSmoother, LinearMap, LinearMemory, Memory
from innerloop.recipe.solver import Exact, Fitter, RidgeFitter, Solver, Stepper
from innerloop.recipe.weights import ChannelDecay, Parameters, Past, QueryKernel, Weights, Window

Gates = Mapping[str, Tensor]


class RecipeState(NamedTuple):
    """All that a recipe carries from token to token."""

    parameters: Parameters
    """The memory's parameters, ``[B, G, ...]``; empty before the first token and for weights that ask for a fit a query."""
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
        weights: Which past counts: ``Uniform ScalarDecay ChannelDecay QueryKernel Window``.
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
        for name, family in (("weights", Weights), ("memory", Memory), ("solver", Solver)):
            if not isinstance(getattr(self, name), family):
                raise ValueError(
                    f"{name} must be one of the {name} of innerloop.recipe; got {getattr(self, name)!r}. "
                    "The order is Recipe(weights, memory, solver)."
                )
        _check_together(self.weights, self.memory, self.solver)

    def __repr__(self) -> str:
        """Print as one line."""
        return f"Recipe({self.weights!r}, {self.memory!r}, {self.solver!r})"

    def describe(self) -> tuple[str, str, str]:
        """Return weights, class and solver in a few words each, for a table.

        Example:
            >>> from innerloop.recipe import CrossMoment, LinearMap, Recipe, Uniform
            >>> Recipe(Uniform(), LinearMap(), CrossMoment()).describe()
            ('uniform', 'linear', 'least squares without the covariance')
        """
        return self.weights.words, self.memory.words, self.solver.words

    @property
    def gates(self) -> tuple[str, ...]:
        """The dotted paths of all fields that may change with every token."""
        families = (("weights", self.weights), ("solver", self.solver))
        return tuple(f"{family}.{name}" for family, choice in families for name in choice.gates)

    @property
    def _refits(self) -> bool:
        """Whether every token asks for a fit of the past instead of a step from where the memory stands."""
        if isinstance(self.solver, Stepper) and isinstance(self.solver, Fitter):
            return isinstance(self.weights, QueryKernel | Window)
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
                f"parameters of {self.memory!r} must be one tensor [B, G, K, V]; got {[list(p.shape) for p in parameters]}."
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
        given = self._given(q, k, v, gates, axes=3)
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
        given = self._given(q, k, v, gates, axes=2)
        state = self._begin(q.unsqueeze(2), v.unsqueeze(2)) if state is None else state
        return self._advance(q, k, v, given, state)

    def fit_all(self, q: Tensor, k: Tensor, v: Tensor, *, gates: Gates | None = None) -> Tensor:
        r"""Solve the regression over the whole past anew for every token, by brute force.

        Stacks :math:`\sqrt{\gamma_i}\,\phi(k_i)` and, for a ridge, :math:`\sqrt{\mathrm{ridge}}\, I` into a design matrix
        and applies its pseudo-inverse; a kernel smoother is a plain weighted mean. It shares neither the weights nor
        the solution with :meth:`run`: an independent second opinion.

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
        given = self._given(q, k, v, gates, axes=3)
        weights = self.weights.at(_fields(given, "weights"))
        ridge = given.get("solver.ridge", self.solver.ridge)
        features = self.memory.features(k.transpose(1, 2))                              # [B, G, T, F]
        asked = self.memory.features(q.transpose(1, 2))
        outputs = []
        for t, gamma in enumerate(weights.history(q, k)):
            past, target = features[:, :, : t + 1], v.transpose(1, 2)[:, :, : t + 1]
            if isinstance(self.memory, KernelSmoother):
                o = _weighted_mean(target, gamma, ridge[:, t] if isinstance(ridge, Tensor) else ridge)
            else:
                now = ridge[:, t] if isinstance(ridge, Tensor) else ridge
                o = (asked[:, :, t : t + 1] @ _least_squares(past, target, gamma, now)).squeeze(2)
            outputs.append(o)
        return torch.stack(outputs, dim=1) if outputs else torch.zeros_like(v)

    def _advance(
        self, q: Tensor, k: Tensor, v: Tensor, given: Gates, state: RecipeState
    ) -> tuple[Tensor, RecipeState]:
        """The loop's body: fade, write, read."""
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
        """The state of an empty memory, for pairs of ``[B, G, N, .]``."""
        parameters = () if self._refits else self.memory.zeros(k, v)
        return RecipeState(parameters, self._rest(parameters), None)

    def _rest(self, parameters: Parameters) -> Parameters:
        """A velocity of zero, for a solver that has one."""
        moving = isinstance(self.solver, Stepper) and self.solver.has_velocity
        return tuple(torch.zeros_like(p) for p in parameters) if moving else ()

    def _given(self, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None, axes: int) -> dict[str, Tensor]:
        """Check shapes and gates, and return the gates in the dtype of q."""
        _check_pairs(q, k, v, self.memory, "[B, T, G, .]" if axes == 3 else "[B, G, .]", axes)
        gates = gates or {}
        unknown = [path for path in gates if path not in self.gates]
        if unknown:
            raise ValueError(f"unknown gate {unknown[0]!r}; {self!r} takes {', '.join(self.gates) or 'none'}.")
        for path in self.gates:
            family, name = path.split(".")
            if path not in gates and getattr(getattr(self, family), name) is None:
                raise ValueError(
                    f"{self!r} needs a value for {path}; got none. Pass gates={{{path!r}: tensor}}, or set the field."
                )
        for path, gate in gates.items():
            self._check_gate(path, gate, q, axes)
        return {path: gate.to(q.dtype) for path, gate in gates.items()}

    def _check_gate(self, path: str, gate: Tensor, q: Tensor, axes: int) -> None:
        if not isinstance(gate, Tensor):
            raise TypeError(f"gate {path} must be a tensor, got {type(gate).__name__}. Set the field for a constant.")
        channel = isinstance(self.weights, ChannelDecay) and path == "weights.g"
        free = path == "solver.ridge" and gate.dim() == axes + 1
        want = (*q.shape[:axes], q.shape[-1]) if channel else q.shape[:axes]
        if gate.shape[: axes if free else None] != torch.Size(want):
            raise ValueError(f"gate {path} must have shape {list(want)}; got {list(gate.shape)}. One value a token.")


def _fields(given: Gates, family: str) -> dict[str, Tensor]:
    """The gates of one family, by the name of the field."""
    return {path.partition(".")[2]: gate for path, gate in given.items() if path.startswith(f"{family}.")}


def _check_together(weights: Weights, memory: Memory, solver: Solver) -> None:
    """Say which of the three choices does not go with which, and what would."""
    if isinstance(memory, KernelSmoother) and not (isinstance(weights, QueryKernel) and isinstance(solver, Exact)):
        raise ValueError(
            f"KernelSmoother needs weights QueryKernel and the solver Exact; got {weights!r} and {solver!r}. "
            "Use Recipe(QueryKernel(), KernelSmoother(), Exact()), or LinearMap for the memory."
        )
    if isinstance(weights, QueryKernel) and not isinstance(solver, Fitter):
        raise ValueError(
            f"QueryKernel weights change with every query and need a solver that refits; got {solver!r}. "
            "Use Exact, ConjugateGradients or CrossMoment."
        )
    if isinstance(weights, ChannelDecay) and not (isinstance(memory, LinearMap) and isinstance(solver, Stepper)):
        raise ValueError(
            f"ChannelDecay fades the key channels of a LinearMap between steps; got {memory!r} and {solver!r}. "
            "Use ScalarDecay, which weights pairs, or LinearMap with GradientStep, ImplicitStep or CrossMoment."
        )
    if solver.needs_optimum and not memory.linear:
        raise ValueError(
            f"{type(solver).__name__} needs a memory linear in its parameters; got {memory!r}. "
            "Use GradientStep or ImplicitStep, with more steps for a closer fit."
        )


def _check_pairs(q: Tensor, k: Tensor, v: Tensor, memory: Memory, axes: str, count: int) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or tensor.dtype not in (torch.float32, torch.float64):
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be a float32 or float64 tensor; got {got}. Recipes run in float64 for truth.")
        if tensor.dim() != count + 1 or tensor.shape[:count] != q.shape[:count]:
            raise ValueError(f"{name} must have shape {axes}, the same for q, k and v; got {list(tensor.shape)}.")
        if tensor.dtype != q.dtype:
            raise TypeError(f"q, k and v must share a dtype; got {q.dtype} and {tensor.dtype} for {name}.")
    if q.shape != k.shape:
        raise ValueError(f"k must have the shape of q, {list(q.shape)}; got {list(k.shape)}.")
    if isinstance(memory, MLP) and (k.shape[-1], v.shape[-1]) != (memory.widths[0], memory.widths[-1]):
        raise ValueError(
            f"keys and values of {memory!r} must have widths {memory.widths[0]} and {memory.widths[-1]}; "
            f"got {k.shape[-1]} and {v.shape[-1]}."
        )


def _weighted_mean(v: Tensor, gamma: Tensor, ridge: Tensor | float) -> Tensor:
    """Weigh values ``[B, G, N, V]``; a total weight of 0 reads 0."""
    total = gamma.sum(-1, keepdim=True) + (ridge.reshape(*gamma.shape[:2], 1) if isinstance(ridge, Tensor) else ridge)
    return (gamma.unsqueeze(-1) * v).sum(2) * torch.where(total == 0, 0.0, 1 / torch.where(total == 0, 1.0, total))


def _least_squares(x: Tensor, v: Tensor, gamma: Tensor, ridge: Tensor | float) -> Tensor:
    """Fit ``[B, G, F, V]`` to N rows through the design matrix, never through its square."""
    if not torch.compiler.is_compiling() and bool((gamma < 0).any()):
        raise ValueError("fit_all needs weights of at least 0; got a negative one. Use a kernel that is positive.")
    root = gamma.sqrt().unsqueeze(-1)
    width = x.shape[-1]
    if isinstance(ridge, Tensor):
        penalty = ridge.sqrt().reshape(*x.shape[:2], -1).expand(*x.shape[:2], width)
    else:
        penalty = x.new_full((*x.shape[:2], width), math.sqrt(ridge))
    design = torch.cat([root * x, torch.diag_embed(penalty)], dim=2)
    target = torch.cat([root * v, v.new_zeros(*v.shape[:2], width, v.shape[-1])], dim=2)
    return torch.linalg.pinv(design) @ target


