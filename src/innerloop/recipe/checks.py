"""What goes with what, and what a recipe may be fed; every refusal says what, wanted, got and the cure."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from innerloop.recipe.choice import Choice
from innerloop.recipe.memory import MLP, KernelSmoother, LinearMap, Memory
from innerloop.recipe.solver import Exact, Fitter, Solver, Stepper
from innerloop.recipe.weights import ChannelDecay, QueryKernel, WeightedDecay, Weights


def check_together(weights: Weights, memory: Memory, solver: Solver) -> None:
    """Check that three choices go together.

    Raises:
        ValueError: If one is not of its family, or does not go with another.
    """
    for name, choice, family in (
        ("weights", weights, Weights),
        ("memory", memory, Memory),
        ("solver", solver, Solver),
    ):
        if not isinstance(choice, family):
            raise ValueError(
                f"{name} must be an instance of one of the {name} in innerloop.recipe; got {choice!r}. "
                "The order is Recipe(weights, memory, solver)."
            )
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
    if isinstance(weights, WeightedDecay) and not isinstance(solver, Fitter):
        raise ValueError(
            f"WeightedDecay weighs the pairs of a fit and needs a solver that refits; got {solver!r}. "
            "Use ScalarDecay, and the solver's own rate or strength for the weight of a pair."
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


def check_pairs(q: Tensor, k: Tensor, v: Tensor, memory: Memory, axes: str) -> None:
    """Check shapes and dtypes of ``[*axes, K]``, ``[*axes, K]`` and ``[*axes, V]``.

    Raises:
        TypeError: If the three are not all float32 or all float64 tensors.
        ValueError: If a shape disagrees.
    """
    count = len(axes.split())
    for name, tensor, last in (("q", q, "K"), ("k", k, "K"), ("v", v, "V")):
        if not isinstance(tensor, Tensor) or tensor.dtype not in (torch.float32, torch.float64):
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be a float32 or float64 tensor; got {got}. Convert it; float64 is the truth.")
        if tensor.dtype != q.dtype:
            raise TypeError(f"q, k and v must share a dtype; got {q.dtype} for q, {tensor.dtype} for {name}. Convert.")
        if tensor.dim() != count + 1 or tensor.shape[:count] != q.shape[:count]:
            raise ValueError(
                f"{name} must have shape [{', '.join(axes.split())}, {last}] with the same {axes} in q, k and v; "
                f"got q {list(q.shape)} and {name} {list(tensor.shape)}. Repeat the key heads if there are fewer."
            )
    if q.shape != k.shape:
        raise ValueError(f"q and k must have one width; got q {list(q.shape)} and k {list(k.shape)}. Project one.")
    if isinstance(memory, MLP) and (k.shape[-1], v.shape[-1]) != (memory.widths[0], memory.widths[-1]):
        raise ValueError(
            f"keys and values of {memory!r} must have widths {memory.widths[0]} and {memory.widths[-1]}; "
            f"got {k.shape[-1]} and {v.shape[-1]}. Change MLP.widths."
        )


def known_gates(families: Mapping[str, Choice]) -> dict[str, tuple[str, ...]]:
    """Return the dotted path of every field that a gate may feed, and the axes that the gate may have."""
    return {f"{family}.{name}": axes for family, choice in families.items() for name, axes in choice.gates.items()}


def check_gates(gates: Mapping[str, Tensor], families: Mapping[str, Choice], q: Tensor) -> None:
    """Check that gates are known and complete, and have one value a token of the queries.

    Raises:
        TypeError: If a gate is not a tensor.
        ValueError: If a gate is unknown, missing or of another shape.
    """
    known = known_gates(families)
    for path in gates:
        if path not in known:
            listed = ", ".join(known) or "none"
            raise ValueError(f"gates must be among those of this recipe ({listed}); got {path!r}. Check the path.")
    for path in known:
        family, name = path.split(".")
        if path not in gates and getattr(families[family], name) is None:
            raise ValueError(
                f"{path} must have a value; got neither a field nor a gate. "
                f"Pass gates={{{path!r}: tensor}}, or set the field for a constant."
            )
    for path, gate in gates.items():
        if not isinstance(gate, Tensor):
            raise TypeError(f"gate {path} must be a tensor; got {gate!r}. Set the field for a constant.")
        _check_gate_shape(path, gate, known[path], q)
        _check_gate_values(path, gate)


def _check_gate_values(path: str, gate: Tensor) -> None:
    """Look at values, where there are any to look at: outside of traces and transforms.

    Raises:
        ValueError: If one is NaN, or a log decay is positive.
    """
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or gate.is_meta
    if traced or not gate.numel() or type(gate) not in (Tensor, torch.nn.Parameter):
        return
    high = gate.detach().max().item()
    if math.isnan(high):
        raise ValueError(f"gate {path} must not hold NaN; it does. Look at what makes the gate.")
    if path == "weights.g" and high > 0:
        raise ValueError(f"gate {path} must be at most 0; got {high:g}. It is a log decay: pass decay.log().")


def _check_gate_shape(path: str, gate: Tensor, allowed: tuple[str, ...], q: Tensor) -> None:
    """Check one gate; F, the width of the features, is anybody's guess here.

    Raises:
        ValueError: If it has another shape.
    """
    token = tuple(q.shape[:-1])
    wanted = {"G": token, "G K": tuple(q.shape), "G F": (*token, *gate.shape[-1:])}
    if tuple(gate.shape) not in [wanted[axes] for axes in allowed]:
        shapes = " or ".join(f"{list(token)} + [F]" if axes == "G F" else str(list(wanted[axes])) for axes in allowed)
        raise ValueError(f"gate {path} must have shape {shapes}; got {list(gate.shape)}. It has one value a token.")
