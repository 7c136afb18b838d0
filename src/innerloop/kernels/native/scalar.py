"""The core of all rules whose memory fades by one number a token, as three families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from innerloop.kernels.native.family import Native
from innerloop.kernels.native.library import (
    ABSENT,
    ELEMENTS,
    TENSOR,
    Core,
    Plan,
    address,
    contiguous,
    large_pages,
    resolved,
    strided,
    strided_token,
    threads_for,
)
from innerloop.shapes import compute_dtype

_NO_GRADIENTS = (*ABSENT, *(0,) * 8)
_FIRST = 5 + 9 + 1
"""Where q's address stands in a call, and every six fields on k's, v's and the gates'."""
_STATE = _FIRST + 5 * 6
"""Where the state's stands; the trail, the output and the final state follow."""

CHUNK = 32
"""Tokens a chunk, unless fewer were asked for: what fits beside the memory in a core's cache."""
_LONG = 2048
"""Tokens beyond which a call with gradients takes chunks twice as large: half as many memories to keep."""
TOGETHER = 4
"""Heads that a job takes at most, side by side: what lies together in memory is read together."""


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
        self._last: tuple[Any, Plan] = None, _no_plan

    def forward(
        self, inputs: Sequence[Any], options: Sequence[Any], leave: bool = False
    ) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """Return ``o`` and the memory after the last token, and the trail of memories if that is wanted."""
        q, _, v = inputs[:3]
        cu_seqlens, dtype = options[0], compute_dtype(v.dtype)
        shape = (*v.shape[:2], v.shape[2], v.shape[3])
        # Nobody writes what lies outside of packed sequences.
        out = large_pages(v.new_empty(shape)) if cu_seqlens is None else v.new_zeros(shape)
        rows = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        final = v.new_empty((rows, v.shape[2], q.shape[3], v.shape[3]), dtype=dtype)
        size = _chunk(options, v.shape[1], leave)
        head, keep = self._head(inputs, options, rows, size)
        # Of one chunk there is nothing that would not be had as soon.
        trail = None
        if leave and v.shape[1] > size:
            trail = self.core.trail(*head, 0, 0, 0, *_NO_GRADIENTS)
        self.core.run(0, *head, address(trail), out.data_ptr(), final.data_ptr(), *_NO_GRADIENTS)
        del keep
        return (out, final), trail

    def token(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: dict[str, Any],
        state: Tensor | None,
        scale: float,
        unit: bool,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return what one token ``[B, G, .]`` reads, and the memory after it; no gradient is recorded."""
        tensors = [q, k, v]
        for gate in self.gates:
            x = gates.get(gate)
            if x is not None:
                tensors.append(x)
        key = [scale, unit, k.shape, v.shape, torch.get_num_threads(), *[(x.dtype, x.stride()) for x in tensors]]
        known, plan = self._last
        if key != known:
            plan = self._plan_token(q, k, v, gates.get("g"), gates.get("beta"), scale, unit)
            self._last = key, plan  # in one go: other threads read it
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        if state is None:
            dtype = compute_dtype(v.dtype)
            before, final = 0, torch.empty((*v.shape[:2], k.shape[2], v.shape[2]), dtype=dtype)
        else:
            if not overwrite:
                state = contiguous(state, compute_dtype(v.dtype))
            before, final = state.data_ptr(), state if overwrite else torch.empty_like(state)
        held = [x.resolve_neg() if x.is_neg() else x for x in tensors]
        plan(*[x.data_ptr() for x in held], before, out.data_ptr(), final.data_ptr())
        return out, final

    def _plan_token(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, scale: float, unit: bool
    ) -> Plan:
        rows, heads, width = v.shape
        _, key_heads, key_width = k.shape
        present = [x is not None for x in (q, k, v, g, beta)]
        places = [_FIRST + 6 * i for i, x in enumerate(present) if x]
        return self.core.plan(
            0, (*places, _STATE, _STATE + 2, _STATE + 3),
            rows * heads, threads_for(4 * rows * heads * width * key_width), rows, 1, 0, self.corrects, key_heads, heads,
            key_width, width, 1, 1, unit, v.dtype is torch.float64, scale,
            *strided_token(q), *strided_token(k), *strided_token(v), *strided_token(g), *strided_token(beta),
            0, 0, 0, 0, *_NO_GRADIENTS,
        )  # fmt: skip

    def backward(
        self,
        inputs: Sequence[Any],
        options: Sequence[Any],
        grads: Sequence[Tensor | None],
        needs: Sequence[bool],
        left: Tensor | None = None,
    ) -> list[Tensor]:
        """Return the gradients of those inputs that need one; without a trail its memories are computed again."""
        q, k, v = inputs[:3]
        cu_seqlens, dtype = options[0], compute_dtype(v.dtype)
        rows = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        make = v.new_empty if cu_seqlens is None else v.new_zeros
        shared = v.shape[2] != k.shape[2]
        wide = dtype if shared else v.dtype
        keys = (*v.shape[:3], q.shape[3])
        found: list[Tensor | None] = [large_pages(make(keys, dtype=wide)) if need else None for need in needs[:2]]
        found.append(large_pages(make(v.shape)) if needs[2] else None)
        found += [make(v.shape[:3], dtype=dtype) if need else None for need in needs[3:-1]]
        found.append(v.new_empty((rows, v.shape[2], q.shape[3], v.shape[3]), dtype=dtype) if needs[-1] else None)
        head, keep = self._head(inputs, options, rows, _chunk(options, v.shape[1], True))
        slope = v.new_zeros(()).expand(v.shape) if grads[0] is None else resolved(grads[0])
        end = None if grads[1] is None else contiguous(grads[1], dtype)
        by_gate = dict(zip(self.gates, found[3:-1], strict=True))
        self.core.run(
            1, *head, address(left), 0, 0, *strided(slope), address(end), *map(address, found[:3]),
            *(address(by_gate.get(name)) for name in ("g", "beta")), address(found[-1]), ELEMENTS[wide],
        )  # fmt: skip
        del keep
        if shared:
            found[:2] = [None if x is None else x.unflatten(2, (k.shape[2], -1)).sum(3) for x in found[:2]]
        return [
            x if x.dtype == given.dtype else x.to(given.dtype)
            for x, given in zip(found, inputs, strict=True)
            if x is not None
        ]

    def _head(
        self, inputs: Sequence[Any], options: Sequence[Any], rows: int, size: int
    ) -> tuple[tuple[Any, ...], Any]:
        """Return the call's fields up to the state, and what must live until it is over."""
        q, k, v, *gates, state = inputs
        cu_seqlens, scale, unit = options[:3]
        dtype = compute_dtype(v.dtype)
        named = dict(zip(self.gates, gates, strict=True))
        tensors = [None if x is None else resolved(x) for x in (q, k, v, named.get("g"), named.get("beta"))]
        bounds = None if cu_seqlens is None else cu_seqlens.to(torch.int64).contiguous()
        state = None if state is None else contiguous(state, dtype)
        threads = threads_for(v.numel() * k.shape[3])
        together = max(1, min(TOGETHER, rows * v.shape[2] // (2 * threads)))
        head = (
            rows * -(-v.shape[2] // together), threads, rows, v.shape[1], address(bounds), self.corrects,
            k.shape[2], v.shape[2], k.shape[3], v.shape[3], together, size, unit, dtype == torch.float64, scale,
            *(field for x in tensors for field in strided(x)), address(state),
        )  # fmt: skip
        return head, (tensors, bounds, state)


def _no_plan(*addresses: int) -> None:
    raise AssertionError(addresses)


def _chunk(options: Sequence[Any], length: int, gradients: bool) -> int:
    return min(options[3], 2 * CHUNK if gradients and length > _LONG else CHUNK)
