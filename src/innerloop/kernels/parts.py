"""What a layer has beside its memory, as operators: the short convolution, and norms with their gates.

Where no kernel serves they run in the open, so that a compiler sees what it can join.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from innerloop.algebra.convolution import short_convolution
from innerloop.algebra.norm import Activation, Measure, gated_norm
from innerloop.kernels.native.convolution import Convolution
from innerloop.kernels.native.family import Kernel
from innerloop.kernels.native.norm import Norm
from innerloop.kernels.operator import Operator
from innerloop.kernels.portable import full_precision
from innerloop.shapes import compute_dtype

Open = Callable[..., Any]
"""A differentiable function of an operator's tensors and its options but the last."""


class Part(Operator):
    """``innerloop::name`` and ``innerloop::name_backward`` of any tensors, with one compiled kernel behind them.

    Args:
        name: Operator name in the ``innerloop`` namespace.
        function: The same in plain torch.
        tensors: Its tensors, as a schema has them.
        options: What follows, but for whether a kernel may serve.
        outputs: What it returns, as a schema has it.
        shapes: What stands for its outputs under fake tensors, from all arguments.
        native: The kernel.
    """

    _folds = False

    def __init__(
        self,
        name: str,
        function: Open,
        *,
        tensors: Sequence[str],
        options: Sequence[str],
        outputs: Sequence[str],
        shapes: Callable[..., tuple[Tensor, ...]],
        native: Kernel,
    ) -> None:
        """Define the operator and its backward, and all that the framework asks of them."""
        self.name, self.native = name, native
        self._function, self._shapes = function, shapes
        self._counts, self._fresh = False, True
        self._define(tensors, (*options, "bool native"), outputs)

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Return the outputs for tensors and options, but the last option."""
        if self.native.present and args[0].is_cpu and args[0].numel():
            return self._call((*args, True))
        return self.portable(args, (False,))

    def portable(self, inputs: Sequence[Any], options: Sequence[Any]) -> tuple[Any, ...]:
        """Return the same in plain differentiable torch."""
        with full_precision(inputs[0]):
            found = self._function(*inputs, *options[:-1])
        return found if isinstance(found, tuple) else (found,)

    def _forward_fake(self, *args: Any) -> tuple[Tensor, ...]:
        return self._shapes(*args)


def _convolved(x: Tensor, window: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), x.new_empty(window.shape, dtype=compute_dtype(x.dtype))


def _normed(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return (x.new_empty(x.shape),)


_CONVOLUTION = Part(
    "short_convolution",
    short_convolution,
    tensors=("Tensor x", "Tensor window", "Tensor weight", "Tensor? bias"),
    options=("Tensor? bounds", "bool silu"),
    outputs=("Tensor", "Tensor"),
    shapes=_convolved,
    native=Convolution(),
)
_NORM = Part(
    "gated_norm",
    gated_norm,
    tensors=("Tensor x", "Tensor? gate", "Tensor? weight"),
    options=("str measure", "float eps", "str activation", "bool gate_first"),
    outputs=("Tensor[]",),
    shapes=_normed,
    native=Norm(),
)


def convolve(
    x: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None, bounds: Tensor | None = None, *, silu: bool = True
) -> tuple[Tensor, Tensor]:
    """Convolve ``[B, T, C]`` behind a window, as ``algebra.convolution`` says."""
    return _CONVOLUTION(x, window, weight, bias, bounds, silu)


def norm(
    x: Tensor,
    gate: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    measure: Measure = "mean",
    eps: float,
    activation: Activation = "silu",
    gate_first: bool = False,
) -> Tensor:
    """Norm ``[..., D]``, as ``algebra.norm`` says."""
    # A kernel reads as many numbers as x has, whatever there are.
    if gate is not None and gate.shape != x.shape:
        gate = gate.expand(x.shape)
    if weight is not None and weight.shape != x.shape[-1:]:
        weight = weight.expand(x.shape[-1:])
    return _NORM(x, gate, weight, measure, eps, activation, gate_first)[0]
