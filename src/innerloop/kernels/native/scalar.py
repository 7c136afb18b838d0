"""The core of all rules whose memory fades by one number a token, as three families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from innerloop.kernels.native.family import Native, Values
from innerloop.kernels.native.library import (
    ABSENT,
    ELEMENTS,
    TENSOR,
    Core,
    Plan,
    Recent,
    addresses,
    contiguous,
    empty,
    outline,
    resolved,
    strided,
    structure,
    threads_for,
)
from innerloop.shapes import compute_dtype

CHUNK = 32
"""Tokens a chunk, unless fewer were asked for: what fits beside the memory in a core's cache."""
_LONG = 2048
"""Tokens beyond which a call with gradients takes chunks twice as large: half as many memories to keep."""
_TOGETHER = 4
"""Heads that a job takes at most, side by side: what lies together in memory is read together."""

# Where addresses stand in a call, counted in fields: the bounds; q, k, v, g, beta (six fields each); state, trail, out
# and final; the output's gradient (six), the final state's; those of q, k, v, g, beta and the state.
_BOUNDS, _TOKENS, _STATE = 4, 15, 45
_SLOPE = _STATE + 4
_INPUTS = (_BOUNDS, *range(_TOKENS, _STATE, 6), _STATE, _STATE + 1)
_VALUES = (*_INPUTS, _STATE + 2, _STATE + 3)
_TOKEN = (*range(_TOKENS, _STATE, 6), _STATE, _STATE + 2, _STATE + 3)
_GRADIENTS = (*_INPUTS, _SLOPE, *range(_SLOPE + 6, _SLOPE + 13))


class _Slopes(NamedTuple):
    """A call for gradients, prepared: outlines of those wanted, and how many heads of values share a head of keys."""

    run: Plan
    found: tuple[Tensor | None, ...]
    shared: int


class Scalar(Native):
    """A family with one matrix for its state, through the library.

    Args:
        corrects: 0 if a pair is added, 1 for the delta rule, 2 for the delta rule at the rate of its proximal step.
        gates: Which gates it takes, of ``g`` and ``beta``, in order.
    """

    core = Core(0, f"9q d {5 * TENSOR} 4q {TENSOR} 8q")

    def __init__(self, corrects: int, gates: tuple[str, ...]) -> None:
        """Say which family it is."""
        super().__init__(gates)
        self.corrects = corrects
        self._values = Recent[Values]()
        self._slopes = Recent[_Slopes]()

    def forward(
        self, inputs: Sequence[Any], options: Sequence[Any], leave: bool = False
    ) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """Return ``o`` and the memory after the last token, and the trail of memories if that is wanted."""
        q, k, v, g, beta, state, bounds = self._named(inputs, options)
        key = [leave, options[1:4], structure((q, k, v, g, beta, state, bounds)), torch.get_num_threads()]
        call = self._values.get(key) or self._values.put(key, self._prepare_values(inputs, options, leave))
        # Nobody writes what lies outside of packed sequences.
        out = empty(call.out) if bounds is None else torch.zeros_like(call.out, memory_format=torch.contiguous_format)
        final = empty(call.states[0])
        trail = None if call.trail is None else empty(call.trail)
        call.run(*addresses((bounds, q, k, v, g, beta, state, trail, out, final)))
        return (out, final), trail

    def prepare_token(
        self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Any], state: Tensor | None, scale: float, unit: bool
    ) -> Values:
        """Return a call for one token, good for all tensors of these shapes, strides and dtypes."""
        rows, heads, width = v.shape
        _, key_heads, key_width = k.shape
        work = 4 * rows * heads * width * key_width
        tensors = (q, k, v, gates.get("g"), gates.get("beta"))
        run = self.core.plan(
            0, _TOKEN, rows * heads, threads_for(work), rows, 1, 0, self.corrects, key_heads, heads, key_width, width,
            1, 1, unit, v.dtype is torch.float64, scale,
            *(field for x in tensors for field in strided(None if x is None else x.unsqueeze(1))),
            *(0,) * 4, *ABSENT, *(0,) * 8,
        )  # fmt: skip
        final = outline((rows, heads, key_width, width), compute_dtype(v.dtype))
        return Values(run, outline(v.shape, v.dtype), (final,))

    def token(
        self,
        call: Values,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: dict[str, Any],
        state: Tensor | None,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return what one token ``[B, G, .]`` reads, and the memory after it."""
        g, beta = gates.get("g"), gates.get("beta")
        out = torch.empty_like(call.out, memory_format=torch.contiguous_format)
        if overwrite and state is not None:
            final = state
        else:
            state = None if state is None else contiguous(state, call.states[0].dtype)
            final = empty(call.states[0])
        held = resolved((q, k, v, g, beta))
        call.run(*addresses(held), 0 if state is None else state.data_ptr(), out.data_ptr(), final.data_ptr())
        return out, final

    def backward(
        self,
        inputs: Sequence[Any],
        options: Sequence[Any],
        grads: Sequence[Tensor | None],
        needs: Sequence[bool],
        left: Tensor | None = None,
    ) -> list[Tensor]:
        """Return the gradients of those inputs that need one; without a trail its memories are computed again."""
        q, k, v, g, beta, state, bounds = self._named(inputs, options)
        slope = v.new_zeros(()).expand(v.shape) if grads[0] is None else grads[0].resolve_neg()
        end = None if grads[1] is None else contiguous(grads[1], compute_dtype(v.dtype))
        tensors = (q, k, v, g, beta, state, bounds, slope)
        key = [options[1:4], tuple(needs), structure(tensors), torch.get_num_threads()]
        call = self._slopes.get(key) or self._slopes.put(
            key, self._prepare_slopes(inputs, options, slope, needs)
        )
        found: list[Tensor | None] = [None if x is None else empty(x) for x in call.found]
        if bounds is not None:
            found[:5] = [x if x is None else x.zero_() for x in found[:5]]
        call.run(*addresses((bounds, q, k, v, g, beta, state, left, slope, end, *found)))
        if call.shared > 1:
            found[:2] = [None if x is None else x.unflatten(2, (-1, call.shared)).sum(3) for x in found[:2]]
        given = (q, k, v, g, beta, inputs[-1])
        return [x if x.dtype == y.dtype else x.to(y.dtype) for x, y in zip(found, given, strict=True) if x is not None]

    def _named(self, inputs: Sequence[Any], options: Sequence[Any]) -> list[Any]:
        """Return q, k, v, g, beta, the state and the bounds, each as the library reads it or None."""
        q, k, v, *gates, state = inputs
        g, beta = gates if len(gates) == 2 else (gates[0], None) if self.gates == ("g",) else (None, gates[0])
        found = resolved((q, k, v, g, beta))
        bounds = options[0]
        state = None if state is None else contiguous(state, compute_dtype(v.dtype))
        return [*found, state, None if bounds is None else bounds.to(torch.int64).contiguous()]

    def _prepare_values(self, inputs: Sequence[Any], options: Sequence[Any], leave: bool) -> Values:
        q, _, v = inputs[:3]
        fields = self._fields(inputs, options, leave)
        final = outline((self._rows(inputs, options), v.shape[2], q.shape[3], v.shape[3]), compute_dtype(v.dtype))
        # Of one chunk there is nothing that would not be had as soon.
        long = leave and v.shape[1] > _chunk(options, v.shape[1], leave)
        size = self.core.trail_size(*fields, *(0,) * 4, *ABSENT, *(0,) * 8) if long else 0
        trail = outline((size,), torch.uint8) if long else None
        run = self.core.plan(0, _VALUES, *fields, *(0,) * 4, *ABSENT, *(0,) * 8)
        return Values(run, outline(v.shape, v.dtype), (final,), trail)

    def _prepare_slopes(
        self,
        inputs: Sequence[Any],
        options: Sequence[Any],
        slope: Tensor,
        needs: Sequence[bool],
    ) -> _Slopes:
        q, k, v = inputs[:3]
        dtype, shared = compute_dtype(v.dtype), v.shape[2] // k.shape[2]
        wide = dtype if shared > 1 else v.dtype
        keys, rate = ((*v.shape[:3], q.shape[3]), wide), (v.shape[:3], dtype)
        state = ((self._rows(inputs, options), v.shape[2], q.shape[3], v.shape[3]), dtype)
        needed = dict(zip(("q", "k", "v", *self.gates, "state"), needs, strict=True))
        shapes = {"q": keys, "k": keys, "v": (v.shape, v.dtype), "g": rate, "beta": rate, "state": state}
        found = tuple([outline(*shape) if needed.get(name) else None for name, shape in shapes.items()])
        fields = self._fields(inputs, options, True)
        run = self.core.plan(1, _GRADIENTS, *fields, *(0,) * 4, *strided(slope), *(0,) * 7, ELEMENTS[wide])
        return _Slopes(run, found, shared)

    def _rows(self, inputs: Sequence[Any], options: Sequence[Any]) -> int:
        return inputs[2].shape[0] if options[0] is None else options[0].shape[0] - 1

    def _fields(self, inputs: Sequence[Any], options: Sequence[Any], gradients: bool) -> tuple[Any, ...]:
        """Return the call's fields up to the state's."""
        q, k, v, g, beta, _, _ = self._named(inputs, options)
        _, scale, unit = options[:3]
        rows, (_, length, heads, width), key_width = self._rows(inputs, options), v.shape, k.shape[3]
        threads = threads_for(v.numel() * key_width)
        together = max(1, min(_TOGETHER, rows * heads // (2 * threads)))
        return (
            rows * -(-heads // together), threads, rows, length, 0, self.corrects, k.shape[2], heads, key_width, width,
            together, _chunk(options, length, gradients), unit, v.dtype is torch.float64, scale,
            *(field for x in (q, k, v, g, beta) for field in strided(x)),
        )  # fmt: skip


def _chunk(options: Sequence[Any], length: int, gradients: bool) -> int:
    return min(options[3], 2 * CHUNK if gradients and length > _LONG else CHUNK)
