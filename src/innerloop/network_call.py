"""From a call of a network rule to its arithmetic: checks, precision, heads, mini-batches, packed sequences.

These rules run as plain differentiable torch: their states are tuples of as many weights as the caller's network has,
and derivatives of any order are autograd's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from innerloop.algebra.mini_batches import Grid, back_from, chosen, make_grid, onto, run_blocks
from innerloop.algebra.packing import run_packed
from innerloop.arguments import check_flags
from innerloop.checks import (
    Backend,
    Form,
    check_bounds,
    check_options,
    check_packing,
    choose_form,
    no_number,
    refusal,
)
from innerloop.kernels.loop import token_loop
from innerloop.kernels.portable import full_precision, unit
from innerloop.network import Learner, NetworkRule, Parts
from innerloop.shapes import align_heads, check_shape, check_tensor, compute_dtype, readable

_PLANNING: ContextVar[bool] = ContextVar("planning", default=False)
_LOOKING: ContextVar[bool] = ContextVar("looking", default=True)


class Planned(NamedTuple):
    """How a call that has passed its checks would run."""

    rule: str
    form: str
    chunk_size: int | None
    reasons: tuple[str, ...]


class _Ready(Exception):
    """Thrown from where a call's checks end, if it is only to be explained."""

    def __init__(self, planned: Planned) -> None:
        super().__init__()
        self.planned = planned


def planned(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Planned:
    """Let a call go as far as its checks, and return how it would run."""
    token = _PLANNING.set(True)
    try:
        function(*args, **kwargs)
    except _Ready as ready:
        return ready.planned
    finally:
        _PLANNING.reset(token)
    raise AssertionError("a call ran without begin_call")


@contextmanager
def unlooked() -> Generator[None, None, None]:
    """Leave the values of gates alone, as a single step does."""
    token = _LOOKING.set(False)
    try:
        yield
    finally:
        _LOOKING.reset(token)


def check_tokens(rule: NetworkRule, tokens: dict[str, Tensor], cu_seqlens: Tensor | None) -> dict[str, int]:
    """Check tokens and gates, and return the size of every axis, N among them."""
    sizes: dict[str, int] = {}
    first = next(iter(tokens))
    gates = {gate.name: gate for gate in rule.gates}
    for name, value in tokens.items():
        check_tensor(name, value)
        dtypes = (tokens[first].dtype, torch.float32) if name in gates else (tokens[first].dtype,)
        if value.dtype not in dtypes:
            wanted = " or ".join(dict.fromkeys(_word(dtype) for dtype in dtypes))
            raise TypeError(f"{name} must have {first}'s dtype {wanted}; got {_word(value.dtype)}")
        _check_device(name, value, tokens[first])
        check_shape(name, value, gates[name].axes if name in gates else rule.axes[name], sizes)
    _check_sizes(rule, sizes)
    sizes["N"] = sizes["B"]
    if cu_seqlens is not None:
        check_packing(cu_seqlens, sizes["B"])
        sizes["N"] = cu_seqlens.shape[0] - 1
    inside = slice(None) if cu_seqlens is None or not readable(cu_seqlens) else check_bounds(cu_seqlens, sizes["T"])
    for name in gates:
        if _LOOKING.get() and readable(tokens[name]) and bool(tokens[name][:, inside].isnan().any()):
            raise no_number(name)
    return sizes


def _check_sizes(rule: NetworkRule, sizes: dict[str, int]) -> None:
    for axis, size in sizes.items():
        if axis not in "BTN" and size < 1:
            raise ValueError(f"{axis} must be at least 1; got {size}")
    if "H" in sizes and sizes.get("G", sizes["H"]) % sizes["H"]:
        raise ValueError(f"v must have a multiple of q and k's heads; got {sizes['G']} and {sizes['H']}")


def check_weights(
    name: str, given: object, axes: Sequence[tuple[str, ...]], sizes: dict[str, int], like: Tensor
) -> None:
    """Check a tuple of weights, one tensor for each of ``axes``."""
    if not isinstance(given, tuple | list):
        raise TypeError(f"{name} must be a tuple of tensors; got {type(given).__name__}")
    for place, (tensor, wanted) in enumerate(zip(given, axes, strict=True)):
        check_parameter(f"{name}[{place}]", tensor, wanted, sizes, like)


def check_parameter(name: str, given: Tensor, axes: tuple[str, ...], sizes: dict[str, int], like: Tensor) -> None:
    """Check one tensor that every row shares."""
    check_tensor(name, given)
    check_shape(name, given, axes, sizes)
    _check_device(name, given, like)


def _check_device(name: str, value: Tensor, like: Tensor) -> None:
    if value.device != like.device:
        raise ValueError(f"{name} must be on the inputs' device {like.device}; got {value.device}")


def _check_state(rule: NetworkRule, state: Any, begun: Parts, rows: int) -> None:  # ruff: ignore[any-type] - any structure
    wanted = rule.state_type(*begun, torch.empty(rows, dtype=torch.int64, device="meta"))
    found, hoped = rule.named(state), rule.named(wanted)
    if list(found) != list(hoped):
        raise ValueError(f"the initial state must hold {', '.join(hoped)}; got {', '.join(found)}")
    for name, tensor in found.items():
        if name == "position":
            if tensor.dtype != torch.int64:
                raise TypeError(f"the initial state's position must have dtype int64; got {_word(tensor.dtype)}")
        else:
            check_tensor(f"the initial state's {name}", tensor)
        if tensor.shape != hoped[name].shape:
            raise ValueError(f"the initial state's {name} must have shape {list(hoped[name].shape)}; "
                             f"got {list(tensor.shape)}")  # fmt: skip


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def widened(tensors: Any, dtype: torch.dtype) -> Any:  # ruff: ignore[any-type] - any structure
    """Return tensors, or tuples of them, in the precision of arithmetic."""
    if isinstance(tensors, Tensor):
        return tensors.to(dtype)
    return tuple(widened(x, dtype) for x in tensors)


def per_row(weights: Any, rows: int) -> Any:  # ruff: ignore[any-type] - any structure
    """Return shared weights ``[G, ...]`` as every row's own, ``[N, G, ...]``."""
    if isinstance(weights, Tensor):
        return weights.expand(rows, *weights.shape)
    return tuple(per_row(x, rows) for x in weights)


class Started(NamedTuple):
    """A call whose options are checked: where its state begins, and how it runs."""

    rule: NetworkRule
    parts: Parts
    position: Tensor | None
    """None where every row begins at its first token."""
    given: Any
    """The initial state."""
    dtype: torch.dtype
    wanted: bool
    """Whether the final state is returned."""
    form: str
    limit: int

    def finish(self, parts: Parts, sizes: dict[str, int], like: Tensor, cu_seqlens: Tensor | None) -> Any:  # ruff: ignore[any-type] - any structure
        """Return the state after the call, if wanted."""
        if not self.wanted:
            return None
        lengths = sizes["T"] if cu_seqlens is None else cu_seqlens.diff().to(torch.int64)
        start = like.new_zeros(sizes["N"], dtype=torch.int64) if self.position is None else self.position
        return self.rule.state_type(*apart(parts, {id(x) for x in pytree.tree_leaves(self.given)}), start + lengths)


def begin_call(
    rule: NetworkRule,
    sizes: dict[str, int],
    begun: Parts,
    initial_state: Any,  # ruff: ignore[any-type] - any structure
    dtype: torch.dtype,
    output_final_state: bool,
    form: Form,
    chunk_size: int | None,
    backend: Backend | None,
    *,
    scale: float | None = None,
    l2norm: bool = False,
    ignored: str = "",
    mini_batches: Sequence[int] = (),
) -> Started:
    """Check the options and the initial state, ``begun`` where there is none, but for its ``ignored`` field."""
    check_flags(output_final_state=output_final_state)
    chosen_form = choose_form(rule, sizes["T"], form)
    limit = check_options(rule, (), scale, chunk_size, backend, l2norm)
    parts, position = begun, None
    if initial_state is not None:
        if ignored and type(initial_state) is rule.state_type:
            initial_state = initial_state._replace(**{ignored: ()})
        _check_state(rule, initial_state, begun, sizes["N"])
        parts, position = widened(tuple(initial_state[:-1]), dtype), initial_state.position
    if _PLANNING.get():
        raise _Ready(_plan(rule, sizes["T"], form, chosen_form, limit, backend, mini_batches))
    return Started(rule, parts, position, initial_state, dtype, output_final_state, chosen_form, limit)


def _plan(
    rule: NetworkRule, length: int, form: Form, chosen_form: str, limit: int, backend: Backend | None,
    mini_batches: Sequence[int],
) -> Planned:  # fmt: skip
    if form != "auto":
        why = f"form={form!r} was asked for"
    else:
        why = "T = 1: one token is one step" if length == 1 else f"T = {length}: the chunk form is parallel in time"
    asked = f"backend={backend!r} was asked for" if backend else refusal(rule)
    sizes = " and ".join(map(str, dict.fromkeys(mini_batches)))
    begins = f"gradients are taken where a mini-batch of {sizes} began"
    return Planned(rule.name, chosen_form, limit if chosen_form == "chunk" else None, (why, asked, begins))


def run_sequence(
    learner: Learner,
    tokens: list[Tensor],
    neutral: list[float],
    parts: Parts,
    started: Started,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Parts]:
    """Run wide, aligned tokens through a learner, from where a call begins."""
    with full_precision(tokens[0]):
        return _Run(learner, started.form, started.limit, neutral)(tokens, parts, started.position, cu_seqlens)


def call(
    rule: NetworkRule,
    tokens: dict[str, Tensor],
    learner: Learner,
    sizes: dict[str, int],
    *,
    scale: float | None,
    initial_state: Any,  # ruff: ignore[any-type] - any structure
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    use_qk_l2norm_in_kernel: bool = False,
    form: Form,
    chunk_size: int | None,
    backend: Backend | None,
) -> tuple[Tensor, Any]:
    """Run checked tokens through a learner, and return ``(o, state)``; ``state`` is None unless asked for."""
    last = tokens.get("v", next(iter(tokens.values())))
    started = begin_call(
        rule, sizes, learner.begin(sizes["N"]), initial_state, compute_dtype(last.dtype), output_final_state, form,
        chunk_size, backend, scale=scale, l2norm=use_qk_l2norm_in_kernel, mini_batches=learner.mini_batches,
    )  # fmt: skip
    wide = _prepared(tokens, started.dtype, use_qk_l2norm_in_kernel, sizes)
    neutral = [rule.neutral.get(name, 0.0) for name in tokens]
    out, parts = run_sequence(learner, wide, neutral, started.parts, started, cu_seqlens)
    if scale is not None:
        out = out * scale
    return out.to(last.dtype), started.finish(parts, sizes, last, cu_seqlens)


def apart(parts: Any, taken: set[int]) -> Any:  # ruff: ignore[any-type] - any structure
    """Copy what is an input, stands there twice or shares memory between rows, so that a state is the caller's own."""
    if not isinstance(parts, Tensor):
        return tuple(apart(x, taken) for x in parts)
    # A compiler cannot be asked what is a view, and hands out no memory twice.
    view = not torch.compiler.is_compiling() and parts._is_view()
    if id(parts) in taken or view or not parts.is_contiguous():
        return parts.clone(memory_format=torch.contiguous_format)
    taken.add(id(parts))
    return parts


def _prepared(
    tokens: dict[str, Tensor], dtype: torch.dtype, l2norm: bool, sizes: dict[str, int]
) -> list[Tensor]:
    """Return tokens wide, keys and queries of unit length if asked for, heads repeated to value heads."""
    prepared = []
    for name, token in tokens.items():
        token = token.to(dtype)
        if name in ("q", "k"):
            token = unit(token) if l2norm else token
            token = align_heads(token, sizes.get("G", sizes["H"]))
        prepared.append(token)
    return prepared


class _Run:
    """One call behind its checks: a token loop or blocks, over rows or packed sequences."""

    def __init__(self, learner: Learner, form: str, limit: int, neutral: list[float]) -> None:
        """Keep what stays the same for all sequences."""
        self.learner, self.limit, self.neutral = learner, limit, neutral
        self.loops = form == "recurrent"
        self.period = 1 if self.loops else math.lcm(*learner.mini_batches)

    def __call__(
        self, tokens: list[Tensor], parts: Parts, position: Tensor | None, bounds: Tensor | None
    ) -> tuple[Tensor, Parts]:
        """Return ``o`` and the state's parts after the last token."""
        if bounds is None:
            return self._rows(tokens, parts, position)
        rows = bounds.shape[0] - 1
        known = tokens[0].new_zeros(rows, dtype=torch.int64) if position is None else position
        if not readable(bounds):
            return self._aligned(tokens, parts, known, bounds.long())
        flat, spec = pytree.tree_flatten(parts)

        def dense(pieces: Sequence[Tensor | None], states: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
            *weights, place = states
            whole: list[Tensor] = [x for x in pieces if x is not None]
            out, after = self._rows(whole, pytree.tree_unflatten(weights, spec), None if position is None else place)
            return out, tuple(pytree.tree_leaves(after))

        # The position goes in first: what is empty on its side has no rows to tell its device.
        out, after = run_packed(dense, tokens, (*flat, known), bounds.tolist())
        return out, pytree.tree_unflatten(list(after), spec)

    def _rows(self, tokens: list[Tensor], parts: Parts, position: Tensor | None) -> tuple[Tensor, Parts]:
        """Run rows of equal length."""
        if tokens[0].shape[1] == 0:
            return self._nothing(tokens), parts
        if self.loops:
            return self._loop(tokens, parts, position, None)
        if position is None or tokens[0].shape[0] == 0:
            return self._blocks(tokens, parts, 0, None)
        if readable(position):
            places = set((position % self.period).tolist())
            if len(places) == 1:
                return self._blocks(tokens, parts, places.pop(), None)
        return self._aligned(tokens, parts, position, None)

    def _aligned(
        self, tokens: list[Tensor], parts: Parts, position: Tensor, bounds: Tensor | None
    ) -> tuple[Tensor, Parts]:
        """Run rows that stand at different places of their mini-batches, or whose lengths nobody may look at."""
        B, T = tokens[0].shape[:2]
        if T == 0:
            return self._nothing(tokens), parts
        width = T + self.period - 1
        grid = make_grid(B, T, width, position % self.period, bounds)
        placed = [onto(grid, token, neutral) for token, neutral in zip(tokens, self.neutral, strict=True)]
        out, parts = self._loop(placed, parts, position, grid) if self.loops else self._blocks(placed, parts, 0, grid)
        return back_from(grid, out), parts

    def _blocks(self, tokens: list[Tensor], parts: Parts, place: int, grid: Grid | None) -> tuple[Tensor, Parts]:
        learner = self.learner
        return run_blocks(
            learner.block, learner.turn, tokens, parts, place=place, sizes=learner.mini_batches, limit=self.limit,
            grid=grid,
        )  # fmt: skip

    def _loop(
        self, tokens: list[Tensor], parts: Parts, position: Tensor | None, grid: Grid | None
    ) -> tuple[Tensor, Parts]:
        learner = self.learner
        start = tokens[0].new_zeros(tokens[0].shape[0], dtype=torch.int64) if position is None else position

        def step(*columns: Any) -> tuple[Tensor, Any]:
            *token, (parts, position) = columns
            real = None if grid is None else token.pop()
            out, after = learner.step(token, parts, position)
            for index, size in enumerate(learner.mini_batches):
                after = chosen((position + 1) % size == 0, learner.turn(after, index), after)
            if real is None:
                return out, (after, position + 1)
            return out, (chosen(real, after, parts), position + real)

        columns = tokens if grid is None else [*tokens, grid.real]
        carried: Any = (parts, start)
        out, carried = token_loop(step, columns, carried)
        return out, carried[0]

    def _nothing(self, tokens: list[Tensor]) -> Tensor:
        like = tokens[self.learner.shaped]
        return like.new_zeros((like.shape[0], 0, *like.shape[2:]))
