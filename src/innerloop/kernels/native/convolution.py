"""The short causal convolution, through the library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from innerloop.kernels.native.family import Kernel
from innerloop.kernels.native.library import (
    ABSENT,
    ELEMENTS,
    TENSOR,
    Core,
    addresses,
    contiguous,
    threads_for,
)
from innerloop.shapes import compute_dtype

_NO_GRADIENTS = (*ABSENT, *(0,) * 4)
_SHARES, _SHARE = 64, 64
"""Shares of the tokens at most, whose gradients of the weights are summed apart; tokens of one at least."""
_WORK = 16
"""What a channel of a token costs, in the multiplications of ``threads_for``."""


class Convolution(Kernel):
    """``(x, window, weight, bias)`` to ``y`` and the window after it; options are bounds, SiLU, and native."""

    no_gradients = _NO_GRADIENTS
    core = Core(3, f"8q {TENSOR} 5q {TENSOR} 4q")

    def forward(
        self, inputs: Sequence[Any], options: Sequence[Any], leave: bool = False
    ) -> tuple[tuple[Tensor, Tensor], None]:
        """Return ``y`` in x's dtype and the last inputs of every sequence."""
        x, window = inputs[:2]
        # Nobody writes what lies outside of packed sequences.
        y = x.new_empty(x.shape) if options[0] is None else x.new_zeros(x.shape)
        after = x.new_empty(window.shape, dtype=compute_dtype(x.dtype))
        head, keep, _ = self._head(inputs, options)
        self.core.run(0, *head, y.data_ptr(), after.data_ptr(), *_NO_GRADIENTS)
        del keep, leave
        return (y, after), None

    def backward(
        self,
        inputs: Sequence[Any],
        options: Sequence[Any],
        grads: Sequence[Tensor | None],
        needs: Sequence[bool],
        left: Tensor | None = None,
    ) -> list[Tensor]:
        """Return the gradients of those inputs that need one."""
        x, window, weight, _ = inputs
        del left
        dtype, (channels, taps) = compute_dtype(x.dtype), weight.shape
        head, keep, shares = self._head(inputs, options)
        make = x.new_empty if options[0] is None else x.new_zeros
        by_x = make(x.shape) if needs[0] else None
        by_window = x.new_empty(window.shape, dtype=dtype) if needs[1] else None
        sums = x.new_empty((shares, taps + 1, channels), dtype=dtype) if needs[2] or needs[3] else None
        slope = x.new_zeros(()).expand(x.shape) if grads[0] is None else grads[0].resolve_neg()
        end = None if grads[1] is None else contiguous(grads[1], dtype)
        self.core.run(
            1, *head, 0, 0, *_strided(slope), *addresses((end, by_x, by_window, sums))
        )
        del keep
        total = None if sums is None else sums.sum(0)
        found = (
            by_x,
            by_window,
            None if total is None or not needs[2] else total[:-1].t(),
            None if total is None or not needs[3] else total[-1],
        )
        return [
            x.to(given.dtype).contiguous() for x, given in zip(found, inputs, strict=True) if x is not None
        ]

    def _head(self, inputs: Sequence[Any], options: Sequence[Any]) -> tuple[tuple[Any, ...], Any, int]:
        """Return the call's fields up to the window, what must live until it is over, and the shares of tokens."""
        x, window, weight, bias = inputs
        bounds, silu, _ = options
        rows, length, channels = x.shape
        sequences, dtype = window.shape[0], compute_dtype(x.dtype)
        size = max(_SHARE, -(-rows * length // _SHARES))
        shares, windows = -(-rows * length // size), -(-sequences // _SHARES) or 1
        x, window = x.resolve_neg(), contiguous(window, dtype)
        weight, bias = contiguous(weight.t(), dtype), None if bias is None else contiguous(bias, dtype)
        bounds = None if bounds is None else bounds.to(torch.int64).contiguous()
        head = (
            shares - (-sequences // windows), threads_for(_WORK * x.numel()), sequences, length, *addresses((bounds,)),
            rows, channels, weight.shape[0], shares, size, windows, silu, dtype is torch.float64, *_strided(x),
            *addresses((weight, bias, window)),
        )  # fmt: skip
        return head, (x, window, weight, bias, bounds), shares


def _strided(x: Tensor) -> tuple[int, ...]:
    row, token, channel = x.stride()
    return (x.data_ptr(), row, token, 0, channel, ELEMENTS[x.dtype])
