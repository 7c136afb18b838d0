"""From raw inputs to what an algebra form wants, in plain differentiable torch.

Half types are widened, queries and keys made unit length, the scale put on the query (a read is linear in it), key
heads repeated to value heads, absent states filled with zeros, packed sequences taken apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from innerloop.algebra.packing import run_packed
from innerloop.shapes import align_heads, compute_dtype

if TYPE_CHECKING:
    from innerloop.kernels.operator import Options

Inputs = Sequence[Any]
"""Tensors in order, None for a gate or state that is absent."""

Dense = Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
"""``dense(tokens, states, chunk_size, constants)`` with tokens (q, k, v, *gates) as ``[B, T, G, ...]``."""


class Portable:
    """A family's algebra as a function of raw inputs: (q, k, v, *gates, *states) and options."""

    def __init__(
        self, dense: Dense, gates: int, states: dict[str, tuple[str, ...]], *, grouped: bool, grows: bool
    ) -> None:
        """Take the algebra, how many gates it has, its states' axes, and what is peculiar to attention."""
        self.dense = dense
        self.gates = gates
        self.states = states
        self._axes = tuple(states.values())
        self.grouped = grouped
        self.grows = grows

    def __call__(self, inputs: Inputs, options: Options) -> tuple[Tensor, ...]:
        """Return ``o`` in v's dtype and the states after the last token."""
        if autocasts(inputs[0]):
            with full_precision(inputs[0]):
                return self._run(inputs, options)
        return self._run(inputs, options)

    def _run(self, inputs: Inputs, options: Options) -> tuple[Tensor, ...]:
        v = inputs[2]
        tokens = widened(inputs[: 3 + self.gates], v.dtype)
        heads = max(tokens[0].shape[-2], v.shape[-2])
        bounds = None if options.cu_seqlens is None else options.cu_seqlens.tolist()
        rows = v.shape[0] if bounds is None else len(bounds) - 1
        states = self.filled(inputs, rows)

        def dense(tokens: Inputs, states: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
            if tokens[0].shape[1] == 0:
                return tokens[2].new_zeros((tokens[0].shape[0], 0, heads, v.shape[-1])), states
            # Behind the packing: at a token outside of all sequences, unit length has the derivative 0 * NaN.
            q, k = prepared(tokens[0], tokens[1], options.l2norm, options.scale)
            if not self.grouped:
                q, k = align_heads(q, v.shape[-2]), align_heads(k, v.shape[-2])
            return self.dense([q, k, *tokens[2:]], states, options.chunk_size, options.constants)

        if bounds is None:
            out, after = dense(tokens, states)
        else:
            out, after = run_packed(dense, tokens, states, bounds)
            after = self._padded(after, inputs, rows)
        return (out if out.dtype == v.dtype else out.to(v.dtype)), *after

    def filled(self, inputs: Inputs, rows: int) -> tuple[Tensor, ...]:
        """Return the states in the precision of arithmetic, zeros where there are none."""
        v, given = inputs[2], inputs[3 + self.gates :]
        dtype = compute_dtype(v.dtype)
        if all([
            state is not None and (state.dtype == dtype or not axes)
            for state, axes in zip(given, self._axes, strict=True)
        ]):
            return tuple(given)
        dtypes, shapes = self.state_dtypes(dtype), self.state_shapes(inputs, rows)
        return tuple(
            v.new_zeros(shape, dtype=wanted) if state is None else state.to(wanted)
            for state, shape, wanted in zip(given, shapes, dtypes, strict=True)
        )

    def _padded(self, states: tuple[Tensor, ...], inputs: Inputs, rows: int) -> tuple[Tensor, ...]:
        """Give states that grow the one capacity that is known without looking at the lengths."""
        if not self.grows:
            return states
        shapes = self.state_shapes(inputs, rows, after=inputs[0].shape[1])
        return tuple(
            torch.cat((state, state.new_zeros((rows, shape[1] - state.shape[1], *shape[2:]))), 1)
            if len(shape) > 1
            else state
            for state, shape in zip(states, shapes, strict=True)
        )

    def state_shapes(self, inputs: Inputs, rows: int, after: int = 0) -> list[tuple[int, ...]]:
        """Return the shape of each state ``after`` so many tokens; S is 0 where no state was given."""
        q, k, v = inputs[:3]
        sizes = {"G": v.shape[-2], "H": k.shape[-2], "K": q.shape[-1], "V": v.shape[-1]}
        shapes = []
        for axes, state in zip(self.states.values(), inputs[3 + self.gates :], strict=True):
            if self.grows and "S" in axes:
                sizes["S"] = after + (0 if state is None else state.shape[1])
            shapes.append((rows, *(sizes[axis] for axis in axes)))
        return shapes

    def state_dtypes(self, dtype: torch.dtype) -> list[torch.dtype]:
        """Return each state's dtype; one without axes counts tokens."""
        return [dtype if axes else torch.int64 for axes in self.states.values()]


def widened(tensors: Inputs, dtype: torch.dtype) -> list[Any]:
    """Return the tensors in the precision of arithmetic for inputs of ``dtype``."""
    dtype = compute_dtype(dtype)
    return [x if x is None or x.dtype == dtype else x.to(dtype) for x in tensors]


def prepared(q: Tensor, k: Tensor, l2norm: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return unit (where asked for) keys, and queries that carry the scale."""
    if l2norm:
        q, k = unit(q), unit(k)
    return (q if scale == 1.0 else q * scale), k  # ruff: ignore[float-equality-comparison] - 1 itself


def unit(x: Tensor) -> Tensor:
    """Return ``x * rsqrt(sum(x^2) + 1e-6)`` over the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def full_precision(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which autocast lets products alone."""
    return torch.autocast(tensor.device.type, enabled=False) if autocasts(tensor) else nullcontext()


def autocasts(tensor: Tensor) -> bool:
    """Return whether autocast narrows products on the tensor's device."""
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)
