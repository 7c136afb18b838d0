"""The core of all rules whose memory fades channel by channel, as four families."""

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
    address,
    contiguous,
    resolved,
    strided,
    strided_token,
    threads_for,
)
from innerloop.kernels.native.scalar import CHUNK
from innerloop.shapes import compute_dtype

_NO_GRADIENTS = (*ABSENT, *(0,) * 10)
_KINDS = (("g",), ("g", "beta"), ("g", "b", "w"), ("g", "a", "kappa"))
_GENERALIZED = 3


class Channel(Native):
    """A family with one matrix for its state whose channels fade apart, through the library.

    Args:
        gates: Which gates it takes, in order, which says what it is: ``g``; ``g`` and ``beta``; ``g``, ``b`` and ``w``;
            or ``g``, ``a`` and ``kappa``.
    """

    core = Core(1, f"8q d {6 * TENSOR} 3q {TENSOR} 10q")

    def __init__(self, gates: tuple[str, ...]) -> None:
        """Say which family it is."""
        super().__init__(gates)
        self.kind = _KINDS.index(gates)

    def forward(self, inputs: Sequence[Any], options: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Return ``o`` and the memory after the last token."""
        q, _, v = inputs[:3]
        cu_seqlens, dtype = options[0], compute_dtype(v.dtype)
        # Nobody writes what lies outside of packed sequences.
        out = v.new_empty(v.shape) if cu_seqlens is None else v.new_zeros(v.shape)
        rows = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        final = v.new_empty((rows, v.shape[2], q.shape[3], v.shape[3]), dtype=dtype)
        head, keep = self._head(inputs, options, rows)
        self.core.run(0, *head, out.data_ptr(), final.data_ptr(), *_NO_GRADIENTS)
        del keep
        return out, final

    def token(
        self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Any], state: Tensor | None, scale: float, unit: bool
    ) -> tuple[Tensor, Tensor]:
        """Return what one token ``[B, G, .]`` reads, and the memory after it; no gradient is recorded."""
        rows, heads, width = v.shape
        _, key_heads, key_width = k.shape
        dtype = compute_dtype(v.dtype)
        out = torch.empty((rows, heads, width), dtype=v.dtype)
        final = torch.empty((rows, heads, key_width, width), dtype=dtype)
        tensors = [resolved(x) for x in (q, k, v, *(gates[name] for name in self.gates))]
        before = None if state is None else contiguous(state, dtype)
        self.core.run(
            0, rows * heads, threads_for(rows * heads * width * key_width), rows, 1, 0, self.kind, key_heads, heads,
            key_width, width, 1, unit, dtype is torch.float64, scale,
            *(field for x in tensors for field in strided_token(x)), *ABSENT * (6 - len(tensors)), address(before),
            out.data_ptr(), final.data_ptr(), *_NO_GRADIENTS,
        )  # fmt: skip
        return out, final

    def backward(
        self, inputs: Sequence[Any], options: Sequence[Any], grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> list[Tensor]:
        """Return the gradients of those inputs that need one."""
        q, k, v, *gates, _ = inputs
        cu_seqlens, dtype = options[0], compute_dtype(v.dtype)
        rows = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        make = v.new_empty if cu_seqlens is None else v.new_zeros
        shared = v.shape[2] != k.shape[2]
        keyed = (*v.shape[:3], q.shape[3])
        # Where value heads share a key head, what it gets from each is summed behind the call, unrounded.
        wide = [dtype if shared else v.dtype] * 2
        found: list[Tensor | None] = [make(keyed, dtype=wide[0]) if need else None for need in needs[:2]]
        found.append(make(v.shape) if needs[2] else None)
        for i, (gate, need) in enumerate(zip(gates, needs[3:-1], strict=True)):
            kappa = shared and self.kind == _GENERALIZED and i == 2
            shape, element = (keyed, dtype) if kappa else (gate.shape, gate.dtype)
            found.append(make(shape, dtype=element) if need else None)
        found.append(v.new_empty((rows, v.shape[2], q.shape[3], v.shape[3]), dtype=dtype) if needs[-1] else None)
        head, keep = self._head(inputs, options, rows)
        slope = v.new_zeros(()).expand(v.shape) if grads[0] is None else resolved(grads[0])
        end = None if grads[1] is None else contiguous(grads[1], dtype)
        absent = (0,) * (3 - len(gates))
        kappa = dtype if shared else gates[-1].dtype
        self.core.run(
            1, *head, 0, 0, *strided(slope), address(end), *map(address, found[:-1]), *absent, address(found[-1]),
            ELEMENTS[wide[0]], ELEMENTS[kappa],
        )  # fmt: skip
        del keep
        return [_fitted(x, given) for x, given in zip(found, inputs, strict=True) if x is not None]

    def _head(self, inputs: Sequence[Any], options: Sequence[Any], rows: int) -> tuple[tuple[Any, ...], Any]:
        """Return the call's fields up to the state, and what must live until it is over."""
        *tokens, state = inputs
        _, k, v = tokens[:3]
        cu_seqlens, scale, unit, chunk = options[:4]
        dtype = compute_dtype(v.dtype)
        tensors = [resolved(x) for x in tokens]
        bounds = None if cu_seqlens is None else cu_seqlens.to(torch.int64).contiguous()
        state = None if state is None else contiguous(state, dtype)
        head = (
            rows * v.shape[2], threads_for(v.numel() * k.shape[3]), rows, v.shape[1], address(bounds), self.kind,
            k.shape[2], v.shape[2], k.shape[3], v.shape[3], min(chunk, CHUNK), unit, dtype == torch.float64, scale,
            *(field for x in tensors for field in strided(x)), *ABSENT * (6 - len(tensors)), address(state),
        )  # fmt: skip
        return head, (tensors, bounds, state)


def _fitted(grad: Tensor, given: Tensor) -> Tensor:
    """Return a gradient with the heads and in the precision of what was given."""
    if grad.shape != given.shape:
        grad = grad.unflatten(2, (given.shape[2], -1)).sum(3)
    return grad if grad.dtype == given.dtype else grad.to(given.dtype)
