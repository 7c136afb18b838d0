"""The core of the rule whose memory moves with momentum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from innerloop.kernels.native.family import Native, State, Values
from innerloop.kernels.native.library import (
    ABSENT,
    ELEMENTS,
    TENSOR,
    Core,
    addresses,
    contiguous,
    empty,
    outline,
    resolved,
    strided,
    threads_for,
)
from innerloop.shapes import compute_dtype

CHUNK = 32
"""Tokens a chunk, unless fewer were asked for."""
_NO_GRADIENTS = (*ABSENT, *(0,) * 11)
# Where addresses stand in a call, counted in fields: q, k, v and three gates (six fields each), then state, momentum,
# trail, out and what both states become.
_TOKENS, _STATE = 13, 49
_TOKEN = (*range(_TOKENS, _STATE, 6), _STATE, _STATE + 1, *range(_STATE + 3, _STATE + 6))


class Momentum(Native):
    """The memory ``S`` and its momentum ``U``, through the library; the gates are theta, eta and alpha."""

    core = Core(2, f"7q d {6 * TENSOR} 6q {TENSOR} 11q")

    def forward(
        self, inputs: Sequence[Any], options: Sequence[Any], leave: bool = False
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Return ``o``, both matrices after the last token, and the trail of both and of the writes if it is wanted."""
        q, _, v = inputs[:3]
        # Nobody writes what lies outside of packed sequences.
        out = empty(v) if options[0] is None else empty(v).zero_()
        like = outline((_rows(v, options), v.shape[2], q.shape[3], v.shape[3]), compute_dtype(v.dtype))
        final, momentum = empty(like), empty(like)
        fields, keep = self._fields(inputs, options)
        trail = None
        if leave and v.shape[1] > min(options[3], CHUNK):  # of one chunk there is nothing that would not be had as soon
            size = self.core.trail_size(*fields, *(0,) * 4, *_NO_GRADIENTS)
            trail = empty(outline((size,), torch.uint8))
        self.core.run(0, *fields, *addresses((trail, out, final, momentum)), *_NO_GRADIENTS)
        del keep
        return (out, final, momentum), trail

    def backward(
        self,
        inputs: Sequence[Any],
        options: Sequence[Any],
        grads: Sequence[Tensor | None],
        needs: Sequence[bool],
        left: Tensor | None = None,
    ) -> list[Tensor]:
        """Return the gradients of those inputs that need one; without a trail both matrices are computed again."""
        q, k, v = inputs[:3]
        dtype, shared = compute_dtype(v.dtype), v.shape[2] // k.shape[2]
        wide = dtype if shared > 1 else v.dtype
        keys, gate = ((*v.shape[:3], q.shape[3]), wide), (v.shape[:3], dtype)
        matrix = ((_rows(v, options), v.shape[2], q.shape[3], v.shape[3]), dtype)
        shapes = (keys, keys, (v.shape, v.dtype), gate, gate, gate, matrix, matrix)
        found = [empty(outline(*shape)) if need else None for shape, need in zip(shapes, needs, strict=True)]
        if options[0] is not None:
            found[:6] = [x if x is None else x.zero_() for x in found[:6]]
        slope = v.new_zeros(()).expand(v.shape) if grads[0] is None else grads[0].resolve_neg()
        ends = [x if x is None else contiguous(x, dtype) for x in grads[1:]]
        fields, keep = self._fields(inputs, options)
        places = addresses((left, None, None, None))
        self.core.run(1, *fields, *places, *strided(slope), *addresses((*ends, *found)), ELEMENTS[wide])
        del keep
        if shared > 1:
            found[:2] = [None if x is None else x.unflatten(2, (-1, shared)).sum(3) for x in found[:2]]
        return [x.to(given.dtype) for x, given in zip(found, inputs, strict=True) if x is not None]

    def prepare_token(
        self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Any], state: State, scale: float, unit: bool
    ) -> Values:
        """Return a call for one token, good for all tensors of these shapes, strides and dtypes."""
        rows, heads, width = v.shape
        key_heads, key_width = k.shape[1:]
        threads = threads_for(6 * rows * heads * width * key_width)
        run = self.core.plan(
            0, _TOKEN, rows * heads, threads, rows, 1, 0, key_heads, heads, key_width, width, 1, unit,
            v.dtype is torch.float64, scale,
            *(field for x in (q, k, v, *gates.values()) for field in strided(x.unsqueeze(1))),
            *(0,) * 6, *_NO_GRADIENTS,
        )  # fmt: skip
        final = outline((rows, heads, key_width, width), compute_dtype(v.dtype))
        return Values(run, outline(v.shape, v.dtype), (final, final))

    def token(
        self,
        call: Values,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: dict[str, Any],
        state: State,
        overwrite: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what one token ``[B, G, .]`` reads, and both matrices after it."""
        out = torch.empty_like(call.out, memory_format=torch.contiguous_format)
        before = (None, None) if state is None else [contiguous(x, call.states[0].dtype) for x in state]
        after = tuple(state) if overwrite and state is not None else tuple(empty(x) for x in call.states)
        held = resolved((q, k, v, *gates.values()))
        call.run(*addresses((*held, *before, out, *after)))
        return out, after

    def _fields(self, inputs: Sequence[Any], options: Sequence[Any]) -> tuple[tuple[Any, ...], Any]:
        """Return the call's fields up to both states, and what must live until it is over."""
        bounds, scale, unit, chunk = options[:4]
        held = resolved(inputs[:6])
        _, k, v, *_ = held
        assert k is not None and v is not None
        states = [x if x is None else contiguous(x, compute_dtype(v.dtype)) for x in inputs[6:]]
        bounds = None if bounds is None else bounds.to(torch.int64).contiguous()
        rows = _rows(v, options)
        fields = (
            rows * v.shape[2], threads_for(2 * v.numel() * k.shape[3]), rows, v.shape[1], *addresses((bounds,)),
            k.shape[2], v.shape[2], k.shape[3], v.shape[3], min(chunk, CHUNK), unit, v.dtype is torch.float64, scale,
            *(field for x in held for field in strided(x)), *addresses(states),
        )  # fmt: skip
        return fields, (held, states, bounds)


def _rows(v: Tensor, options: Sequence[Any]) -> int:
    return v.shape[0] if options[0] is None else options[0].shape[0] - 1
