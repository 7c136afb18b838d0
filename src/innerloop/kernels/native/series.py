"""A token's way through layers as one call: native calls in memory that stays, one behind another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from innerloop.kernels.native.convolution import Convolution
from innerloop.kernels.native.library import HEADER_SIZE, Core, addresses, run_series, threads_for
from innerloop.kernels.native.matrix import Matrices
from innerloop.kernels.native.norm import Norm

_MAPS = 8
"""Linear maps that one call takes."""
_SHARE = 32
"""Rows of a weight in one job."""
_LINEAR = Core(5, f"5q {3 * _MAPS}q")
_GATE = Core(6, "3q d 4q")
_SILU_TIMES, _SIGMOID_TIMES, _DECAY = range(3)

MOST = 8
"""Tokens at most, one a row: of more, a product of matrices makes better use."""


def present() -> bool:
    """Return whether the library has what a series is made of."""
    return _LINEAR.present and _GATE.present and Norm.core.present and Convolution.core.present


class Series:
    """What is done to a token of every row, ``[N, D]``, written down once and then run for one after another.

    All is float32, on the CPU, and records no gradient. What a method returns is memory that a run fills.

    Args:
        rows: N, at most ``MOST``.
    """

    def __init__(self, rows: int) -> None:
        """Begin with nothing to do."""
        self.rows = rows
        self._calls: list[bytes] = []
        self._parts: list[Callable[[], None]] = []
        self._held: list[Any] = []
        self._norm, self._convolution = Norm(), Convolution()

    def room(self, width: int) -> Tensor:
        """Return memory for ``[N, width]``."""
        x = torch.zeros(self.rows, width)
        self._held.append(x)
        return x

    def run(self) -> None:
        """Do all of it for one token."""
        self._close()
        for part in self._parts:
            part()

    def call(self, function: Callable[[], None]) -> None:
        """Call a function between what was written down before and what comes after."""
        self._close()
        self._parts.append(function)

    def linear(self, x: Tensor, weights: Sequence[Tensor], add_to: Tensor | None = None) -> list[Tensor]:
        """Map ``[N, D]`` by each weight ``[W, D]`` to ``[N, W]``; or add what a single one gives to a tensor."""
        outs = [self.room(w.shape[0]) for w in weights] if add_to is None else [add_to]
        assert len(weights) == len(outs) <= _MAPS
        heights = [w.shape[0] for w in weights]
        jobs = sum(-(-height // _SHARE) for height in heights)
        empty = [0] * (_MAPS - len(weights))
        threads = threads_for(4 * sum(heights) * x.numel())  # all is reading, which two threads do sooner
        self._add(
            _LINEAR, jobs, threads, self.rows, 1, 0, self.rows, x.shape[1], _SHARE, add_to is not None, x.data_ptr(),
            *addresses(weights), *empty, *heights, *empty, *addresses(outs), *empty,
        )  # fmt: skip
        self._held += [x, *weights]
        return outs

    def silu(self, x: Tensor, times: Tensor | None = None) -> Tensor:
        """Return SiLU of ``[N, D]``, times another tensor of that shape."""
        return self._gate(_SILU_TIMES, x, times)

    def sigmoid(self, x: Tensor, factor: float) -> Tensor:
        """Return a factor times the logistic function of ``[N, G]``."""
        return self._gate(_SIGMOID_TIMES, x, factor=factor)

    def decay(self, x: Tensor, offset: Tensor, rate: Tensor) -> Tensor:
        """Return -exp(rate) softplus(x + offset) for ``[N, G]``, with ``[G]`` for the others."""
        return self._gate(_DECAY, x, offset, rate)

    def norm(self, x: Tensor, weight: Tensor | None, eps: float, gate: Tensor | None = None, **options: Any) -> Tensor:
        """Return ``innerloop.kernels.parts.norm`` of ``[N, D]`` or ``[N, G, D]``; options are those of the gate."""
        out = self.room(x.shape[1:].numel()).view(x.shape)
        inputs = tuple(None if t is None else t[:, None] if t.ndim == 3 else t for t in (x, gate))
        inputs = (*inputs, weight)
        how = ("mean", eps, options.get("activation", "silu"), options.get("gate_first", False), True)
        self._held.append(inputs)
        fields, held, _ = self._norm._head(inputs, how)
        self._add(self._norm.core, *fields, out.data_ptr(), *Norm.no_gradients)
        self._held.append(held)
        return out

    def convolve(self, x: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve ``[N, C]`` behind a window ``[N, W - 1, C]``, which moves on by the token; and SiLU."""
        out = self.room(x.shape[1])
        fields, held, _ = self._convolution._head((x[:, None], window, weight, bias), (None, True, True))
        jobs, _, *rest = fields
        # One thread, which moves the window when the outputs are there.
        self._add(self._convolution.core, jobs, 1, *rest, out.data_ptr(), window.data_ptr(), *Convolution.no_gradients)
        self._held.append((held, window))
        return out

    def step(
        self,
        native: Matrices,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: dict[str, Tensor],
        states: Sequence[Tensor],
        *,
        scale: float,
        unit: bool,
    ) -> Tensor:
        """Write ``[N, H, K]`` and ``[N, G, V]`` into states ``[N, G, K, V]``, which become those after, and read."""
        out = self.room(v.shape[1:].numel()).view(v.shape)
        tokens = (q, k, v, *(gates.get(name) for name in native.gates))
        held = [x if x is None else x[:, None] for x in tokens]
        self._held.append((held, states))
        self._add(native.core, *native.written(held, states, out, scale, unit))
        return out

    def _gate(
        self, kind: int, x: Tensor, other: Tensor | None = None, rate: Tensor | None = None, factor: float = 1.0
    ) -> Tensor:
        out = self.room(x.shape[1])
        rest = addresses((x, other, rate, out))
        self._add(_GATE, 1, 1, self.rows, 1, 0, kind, self.rows, x.shape[1], factor, *rest)
        self._held.append((x, other, rate))
        return out

    def _close(self) -> None:
        if self._calls:
            self._parts.append(partial(run_series, b"".join(self._calls), len(self._calls)))
            self._calls = []

    def _add(self, core: Core, *fields: float) -> None:
        assert len(fields) > HEADER_SIZE
        self._calls.append(core.written(0, *fields))
