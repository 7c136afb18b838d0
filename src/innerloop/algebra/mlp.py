"""A small network for every row and head: its output, and the signal of its output's error at every layer.

Weights are ``(W1, ..., WL)``, each ``[B, G, in, out]``; inputs are ``[B, G, C, in]``, C tokens that meet the same
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

Activation = Literal["gelu", "gelu_tanh", "silu", "relu"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)

Weights = tuple[Tensor, ...]

_ATEN = torch.ops.aten
_FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}
# What autograd itself calls: one pass over memory each, and differentiable in turn. That of SiLU is not.
_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": _ATEN.gelu_backward.default,
    "gelu_tanh": partial(_ATEN.gelu_backward.default, approximate="tanh"),
    "silu": lambda slope, z: slope * (s := z.sigmoid()) * (1 + z * (1 - s)),
    "relu": lambda slope, z: _ATEN.threshold_backward.default(slope, z, 0),
}


def activate(z: Tensor, activation: str) -> Tensor:
    """Return a(z)."""
    return _FORWARD[activation](z)


def through_activation(slope: Tensor, z: Tensor, activation: str) -> Tensor:
    """Return the gradient at z of what has gradient ``slope`` at a(z)."""
    return _BACKWARD[activation](slope, z)


def apply_mlp(weights: Sequence[Tensor], x: Tensor, activation: str, residual: bool = False) -> Tensor:
    """Return ``a(...a(x W1)...) WL``, plus x if ``residual``."""
    h = x
    for layer, weight in enumerate(weights):
        h = (activate(h, activation) if layer else h) @ weight
    return x + h if residual else h


def layers_of(weights: Sequence[Tensor], x: Tensor, activation: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return what goes into each layer, ``[x, h1, ...]``, and what comes out before activation, ``[z1, ..., zL]``."""
    inputs, outputs = [x], []
    for layer, weight in enumerate(weights):
        if layer:
            inputs.append(activate(outputs[-1], activation))
        outputs.append(inputs[-1] @ weight)
    return inputs, outputs


def signals_of(weights: Sequence[Tensor], outputs: Sequence[Tensor], error: Tensor, activation: str) -> list[Tensor]:
    """Return the loss's gradient at every layer's output, given it at the last; a token's gradient of W is h^T d."""
    signals = [error]
    for weight, z in zip(reversed(weights[1:]), reversed(outputs[:-1]), strict=True):
        signals.append(through_activation(signals[-1] @ weight.mT, z, activation))
    return signals[::-1]


def bent_by(weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return for every layer and token a bound on the curvature of 1/2 |error|^2 in its weights, ``[B, G, C]``.

    What moves layer l by a rank-one step moves the output by at most ``|h|^2`` times the squared (Frobenius) norms of
    all later weights; the slopes of the activations are taken as 1.
    """
    bounds, later = [], None
    for weight, h in zip(reversed(weights), reversed(inputs), strict=True):
        size = h.square().sum(-1)
        bounds.append(size if later is None else later * size)
        norm = weight.square().sum((-2, -1))[..., None]
        later = norm if later is None else later * norm
    return bounds[::-1]
