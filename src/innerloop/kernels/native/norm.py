"""Norms of rows with their gates, through the library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from innerloop.kernels.native.family import Kernel
from innerloop.kernels.native.library import ABSENT, TENSOR, Core, addresses, contiguous, strided, threads_for
from innerloop.shapes import compute_dtype

_NO_GRADIENTS = (*ABSENT, *(0,) * 3)
_MEASURES = {"mean": 0, "sum": 1, "floor": 2}
_ACTIVATIONS = {"silu": 1, "sigmoid": 2}
_JOBS, _JOB = 64, 1 << 13
"""Jobs at most, whose gradients of the weight are summed apart; numbers of one at least."""
_WORK = 16
"""What a number costs, in the multiplications of ``threads_for``."""


class Norm(Kernel):
    """``(x, gate, weight)`` to ``y``; options are measure, eps, activation, whether the gate is first, and native."""

    no_gradients = _NO_GRADIENTS
    core = Core(4, f"8q d {2 * TENSOR} 2q {TENSOR} 3q")

    def forward(
        self, inputs: Sequence[Any], options: Sequence[Any], leave: bool = False
    ) -> tuple[tuple[Tensor], None]:
        """Return ``y`` in x's dtype."""
        x = inputs[0]
        y = x.new_empty(x.shape)
        head, keep, _ = self._head(inputs, options)
        self.core.run(0, *head, y.data_ptr(), *_NO_GRADIENTS)
        del keep, leave
        return (y,), None

    def backward(
        self,
        inputs: Sequence[Any],
        options: Sequence[Any],
        grads: Sequence[Tensor | None],
        needs: Sequence[bool],
        left: Tensor | None = None,
    ) -> list[Tensor]:
        """Return the gradients of those inputs that need one."""
        del left
        x, gate, weight = inputs
        head, keep, jobs = self._head(inputs, options)
        by_x = x.new_empty(x.shape) if needs[0] else None
        by_gate = gate.new_empty(gate.shape) if needs[1] else None
        sums = x.new_empty((jobs, x.shape[-1]), dtype=compute_dtype(x.dtype)) if needs[2] else None
        slope = _rows(x.new_zeros(()).expand(x.shape) if grads[0] is None else grads[0].resolve_neg())
        self.core.run(1, *head, 0, *strided(slope), *addresses((by_x, by_gate, sums)))
        del keep
        found = (by_x, by_gate, None if sums is None else sums.sum(0).to(weight.dtype))
        return [x for x in found if x is not None]

    def _head(self, inputs: Sequence[Any], options: Sequence[Any]) -> tuple[tuple[Any, ...], Any, int]:
        """Return the call's fields up to the weight, what must live until it is over, and the number of jobs."""
        x, gate, weight = inputs
        measure, eps, activation, first, _ = options
        width, dtype = x.shape[-1], compute_dtype(x.dtype)
        rows = x.numel() // width
        share = max(-(-_JOB // width), -(-rows // _JOBS))
        jobs, work = -(-rows // share), _WORK * x.numel()
        x, gate = _rows(x.resolve_neg()), None if gate is None else _rows(gate.resolve_neg())
        weight = None if weight is None else contiguous(weight, dtype)
        head = (
            jobs, threads_for(work), 0, x.shape[1], 0, rows, x.shape[2], width, share, _MEASURES[measure],
            _ACTIVATIONS[activation], first, dtype is torch.float64, eps, *strided(x), *strided(gate),
            *addresses((weight,)),
        )  # fmt: skip
        return head, (x, gate, weight), jobs


def _rows(x: Tensor) -> Tensor:
    """Return ``[..., D]`` as ``[B, T, heads, D]``."""
    if x.ndim == 4:
        return x
    return x.flatten(0, -4) if x.ndim > 4 else x[(None,) * (4 - x.ndim)]
