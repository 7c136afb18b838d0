"""From raw inputs to what an algebra form wants, in plain differentiable torch.

Half types are widened, queries and keys made unit length, the scale put on the query (a read is linear in it), key
heads repeated to value heads, absent states filled with zeros, packed sequences taken apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import _C, Tensor

from innerloop.algebra.packing import run_packed, with_room
from innerloop.shapes import align_heads, compute_dtype

Inputs = Sequence[Any]
"""Tensors in order, None for a gate or state that is absent."""

Dense = Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
"""``dense(tokens, states, chunk_size, constants)`` with tokens (q, k, v, *gates) as ``[B, T, G, ...]``."""


class Portable:
    """A family's algebra as a function of raw inputs: (q, k, v, *gates, *states) and options."""

    def __init__(
        self,
        dense: Dense,
        gates: int,
        states: dict[str, tuple[str, ...]],
        *,
        keyed: dict[int, int],
        grouped: bool = False,
        grows: bool = False,
    ) -> None:
        """Take the algebra, how many gates it has, its states' axes, and what is peculiar to it."""
        self.dense = dense
        self.gates = gates
        self._keyed = ((0, -2), (1, -2), *((3 + place, axis) for place, axis in keyed.items()))
        self.states = states
        self._axes = tuple(states.values())
        self.grouped = grouped
        self.grows = grows

    def __call__(self, inputs: Inputs, options: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Return ``o`` in v's dtype and the states after the last token; options in the order of ``Options``."""
        if _C._is_any_autocast_enabled():
            with full_precision(inputs[0]):
                return self._run(inputs, *options)
        return self._run(inputs, *options)

    def _run(
        self,
        inputs: Inputs,
        cu_seqlens: Tensor | None,
        scale: float,
        l2norm: bool,
        chunk_size: int,
        constants: Sequence[float],
        room: int,
        native: bool,
    ) -> tuple[Tensor, ...]:
        del native
        v = inputs[2]
        if cu_seqlens is None:
            tokens, states = self.aligned(inputs, l2norm, scale, v.shape[0])
            out, after = self._dense(tokens, states, chunk_size, constants)
        else:
            bounds = cu_seqlens.tolist()
            tokens, states = self._widened(inputs, len(bounds) - 1)

            def dense(parts: Inputs, states: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
                tokens = list(parts)
                # Behind the packing: at a token outside of all sequences, unit length has the derivative 0 * NaN.
                self._prepare(tokens, l2norm, scale)
                return self._dense(tokens, states, chunk_size, constants)

            out, after = run_packed(dense, tokens, states, bounds)
            after = self._padded(after, inputs, len(bounds) - 1, room)
        return (out if out.dtype == v.dtype else out.to(v.dtype)), *after

    def _dense(
        self, tokens: Inputs, states: tuple[Tensor, ...], chunk_size: int, constants: Sequence[float]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        q, _, v, *_ = tokens
        if q.shape[1] == 0:
            out = v.new_zeros((q.shape[0], 0, max(q.shape[-2], v.shape[-2]), v.shape[-1]))
            return out, tuple(state.clone() for state in states)
        return self.dense(tokens, states, chunk_size, constants)

    def aligned(self, inputs: Inputs, l2norm: bool, scale: float, rows: int) -> tuple[list[Any], tuple[Tensor, ...]]:
        """Return tokens and states as an algebra form or a step wants them."""
        tokens, states = self._widened(inputs, rows)
        self._prepare(tokens, l2norm, scale)
        return tokens, states

    def _prepare(self, tokens: list[Any], l2norm: bool, scale: float) -> None:
        if l2norm:
            tokens[0], tokens[1] = unit(tokens[0]), unit(tokens[1])
        if scale != 1.0:  # ruff: ignore[float-equality-comparison] - 1 itself
            tokens[0] = tokens[0] * scale
        heads = tokens[2].shape[-2]
        if tokens[0].shape[-2] != heads and not self.grouped:
            for place, axis in self._keyed:
                tokens[place] = align_heads(tokens[place], heads, axis)

    def _widened(self, inputs: Inputs, rows: int) -> tuple[list[Any], tuple[Tensor, ...]]:
        dtype, count = compute_dtype(inputs[2].dtype), 3 + self.gates
        tokens: list[Any] = [x if x is None or x.dtype == dtype else x.to(dtype) for x in inputs[:count]]
        states = tuple(inputs[count:])
        for state, axes in zip(states, self._axes, strict=True):
            if state is None or (axes and state.dtype != dtype):
                return tokens, self._filled(inputs, rows, dtype)
        return tokens, states

    def _filled(self, inputs: Inputs, rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        v, given = inputs[2], inputs[3 + self.gates :]
        return tuple(
            v.new_zeros(shape, dtype=wanted) if state is None else state.to(wanted)
            for state, shape, wanted in zip(
                given, self.state_shapes(inputs, rows), self.state_dtypes(dtype), strict=True
            )
        )

    def _padded(self, states: tuple[Tensor, ...], inputs: Inputs, rows: int, room: int) -> tuple[Tensor, ...]:
        """Give states that grow the room that was promised, or what is known without looking at the lengths."""
        if not self.grows:
            return states
        shapes = self.state_shapes(inputs, rows, after=inputs[0].shape[1], room=room)
        return tuple(
            with_room(state, shape[1]) if len(shape) > 1 else state for state, shape in zip(states, shapes, strict=True)
        )

    def state_shapes(self, inputs: Inputs, rows: int, after: int = 0, room: int = 0) -> list[tuple[int, ...]]:
        """Return the shape of each state ``after`` so many tokens, of which S is ``room`` if that is known.

        S is what a state had before them, or 0, and all of them if not.
        """
        q, k, v = inputs[:3]
        sizes = {"G": v.shape[-2], "H": k.shape[-2], "K": q.shape[-1], "V": v.shape[-1]}
        shapes = []
        for axes, state in zip(self.states.values(), inputs[3 + self.gates :], strict=True):
            if self.grows and "S" in axes:
                sizes["S"] = room or after + (0 if state is None else state.shape[1])
            shapes.append((rows, *(sizes[axis] for axis in axes)))
        return shapes

    def state_dtypes(self, dtype: torch.dtype) -> list[torch.dtype]:
        """Return each state's dtype; one without axes counts tokens."""
        return [dtype if axes else torch.int64 for axes in self.states.values()]


def unit(x: Tensor) -> Tensor:
    """Return ``x * rsqrt(sum(x^2) + 1e-6)`` over the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def full_precision(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which autocast lets products alone."""
    return torch.autocast(tensor.device.type, enabled=False) if autocasts(tensor) else nullcontext()


def autocasts(tensor: Tensor) -> bool:
    """Return whether autocast narrows products on the tensor's device."""
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)
