"""Plain gradient steps on a network whose output is normed before it is compared, a mini-batch at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from innerloop.algebra.mlp import activate, through_activation

EPS = 1e-6
"""Added to the variance, as published."""
ACTIVATION = "gelu_tanh"

Weights = tuple[Tensor, ...]
"""(W1, b1, ..., WL, bL), weights ``[B, G, in, out]``, biases ``[B, G, out]``."""


def norm(z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the layer norm of ``[B, G, C, V]`` with weights and biases ``[G, V]``."""
    unit, _ = _centred(z)
    return unit * weight[:, None] + bias[:, None]


def _centred(z: Tensor) -> tuple[Tensor, Tensor]:
    z = z - z.mean(-1, keepdim=True)
    spread = torch.rsqrt(z.square().mean(-1, keepdim=True) + EPS)
    return z * spread, spread


def norm_signal(z: Tensor, target: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the gradient at z of ``1/2 |norm(z) - target|^2``."""
    unit, spread = _centred(z)
    slope = weight[:, None] * (unit * weight[:, None] + bias[:, None] - target)
    return spread * (slope - slope.mean(-1, keepdim=True) - unit * (unit * slope).mean(-1, keepdim=True))


def apply_biased(weights: Weights, x: Tensor) -> Tensor:
    """Return ``a(...a(x W1 + b1)...) WL + bL``."""
    for layer, (weight, bias) in enumerate(zip(weights[::2], weights[1::2], strict=True)):
        x = (activate(x, ACTIVATION) if layer else x) @ weight + bias[..., None, :]
    return x


def fit_block(
    tokens: Sequence[Tensor],
    state: tuple[Weights, Weights],
    factor: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
) -> tuple[Tensor, tuple[Weights, Weights]]:
    r"""Read ``W_i = W0 - factor_i sum_{j <= i} lr_j grad_j`` for C tokens of one mini-batch.

    With h, d a layer's inputs and signals at the mini-batch's first weights and A the sum of gradients before the
    block, :math:`z = x W_0 + b_0 - f \odot (x A + a + \mathrm{tril}(x h^\top + 1) \, lr \odot d)`.

    Args:
        tokens: q, k, v, lr, ``[B, G, C, ...]``.
        state: The mini-batch's first weights, and the sum of its gradients so far, each (W1, b1, ...).
        factor: What multiplies the sum at each token, ``[C]``.
        norm_weight: Of the layer norm, ``[G, V]``.
        norm_bias: Of the layer norm, ``[G, V]``.

    Returns:
        ``o``, ``[B, G, C, V]``, and the state after the block.
    """
    q, k, v, lr = tokens
    start, total = state
    inputs, signals = _pass(start, k, v - k, norm_weight, norm_bias)
    x, after = q, []
    shrink = factor[:, None]
    for layer, (h, d) in enumerate(zip(inputs, signals, strict=True)):
        weight, bias, summed, summed_bias = *start[2 * layer : 2 * layer + 2], *total[2 * layer : 2 * layer + 2]
        x = activate(x, ACTIVATION) if layer else x
        d = lr[..., None] * d
        moved = x @ summed + summed_bias[..., None, :] + (x @ h.mT + 1).tril() @ d
        x = x @ weight + bias[..., None, :] - shrink * moved
        after += [summed + h.mT @ d, summed_bias + d.sum(-2)]
    return q + norm(x, norm_weight, norm_bias), (start, tuple(after))


def _pass(
    start: Weights, k: Tensor, target: Tensor, norm_weight: Tensor, norm_bias: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Return each layer's inputs and signals on the keys."""
    inputs, outputs = [k], []
    for layer, (weight, bias) in enumerate(zip(start[::2], start[1::2], strict=True)):
        if layer:
            inputs.append(activate(outputs[-1], ACTIVATION))
        outputs.append(inputs[-1] @ weight + bias[..., None, :])
    signals = [norm_signal(outputs[-1], target, norm_weight, norm_bias)]
    for weight, z in zip(reversed(start[2::2]), reversed(outputs[:-1]), strict=True):
        signals.append(through_activation(signals[-1] @ weight.mT, z, ACTIVATION))
    return inputs, signals[::-1]


def settled(state: tuple[Weights, Weights], last: Tensor) -> tuple[Weights, Weights]:
    """Return the state at a mini-batch's end: the weights moved, nothing summed."""
    start, total = state
    moved = tuple(weight - last * summed for weight, summed in zip(start, total, strict=True))
    return moved, tuple(torch.zeros_like(summed) for summed in total)
