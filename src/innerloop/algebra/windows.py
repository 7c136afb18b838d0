"""A network that sums its gradients over a window and moves at the window's end."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from innerloop.algebra.mlp import Weights, bent_by, layers_of, signals_of


def window_block(
    x: Tensor, target: Tensor, rate: Tensor, weights: Weights, total: Weights, activation: str, damped_by: int
) -> tuple[Tensor, Weights]:
    """Return ``x + m(x)`` of C tokens ``[B, G, C, .]`` in one window, and the sum of gradients with theirs in it.

    The loss is ``1/2 |x + m(x) - target|^2``, the gradient that of the weights alone. ``damped_by``: see ``damped``.
    """
    inputs, outputs = layers_of(weights, x, activation)
    y = x + outputs[-1]
    signals = signals_of(weights, outputs, y - target, activation)
    return y, add_gradients(total, inputs, signals, damped(rate, weights, inputs, damped_by))


def damped(rate: Tensor, weights: Weights, inputs: Sequence[Tensor], count: int) -> list[Tensor]:
    """Return each layer's rates, such that ``count`` steps stay on their side of the loss's minimum; 0: as is."""
    if not count:
        return [rate] * len(weights)
    return [rate / (1 + count * rate * bend) for bend in bent_by(weights, inputs)]


def add_gradients(
    total: Weights, inputs: Sequence[Tensor], signals: Sequence[Tensor], rates: Sequence[Tensor]
) -> Weights:
    """Return the sum of gradients with those of more tokens in it, each times its layer's rate ``[B, G, C]``."""
    return tuple(
        summed + h.mT @ (rate[..., None] * d)
        for summed, h, d, rate in zip(total, inputs, signals, rates, strict=True)
    )
