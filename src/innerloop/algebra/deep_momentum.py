"""Gradient descent with momentum and forgetting on a network, a mini-batch at a time.

All gradients of a mini-batch are taken where it began, so no token waits for another: one forward and backward pass of
the network gives them all, and each token's own weights are never formed. A read through layer l is that through the
weights at the start, less what the tokens before it have written, which is a product of inner products.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from innerloop.algebra.decay import running_products
from innerloop.algebra.mlp import Weights, activate, bent_by, layers_of, signals_of


def momentum_block(
    tokens: Sequence[Tensor],
    state: tuple[Weights, Weights, Weights],
    real: Tensor | None,
    activation: str,
    residual: bool,
    normalized: bool,
) -> tuple[Tensor, tuple[Weights, Weights, Weights]]:
    r"""Read ``W_t`` of ``U_t = eta U - theta grad``, ``W_t = (1 - alpha) W + U_t``, for C tokens of one mini-batch.

    With P, M the running products of ``1 - alpha`` and ``eta``, ``P M`` holds how much of write s is in ``W_t``, and
    p, m, r = P m what is left of the weights and the momentum before the block; h, d are a layer's inputs and signals
    at the mini-batch's first weights.

    .. math:: z_l = p \odot x W_l + r \odot x U_l - (P M \theta \circ x h^\top) d

    Args:
        tokens: q, k, v, theta, eta, alpha, ``[B, G, C, ...]``.
        state: The mini-batch's first weights, the weights and the momentum.
        real: ``[B, 1, C]``, 0 where a token changes nothing (its theta and alpha are 0, its eta 1); None if all do.
        activation: Between layers.
        residual: Whether the network adds its input.
        normalized: Whether each layer's rate is damped by its curvature.

    Returns:
        ``o``, ``[B, G, C, V]``, and the state after the block.
    """
    q, k, v, theta, eta, alpha = tokens
    start, weights, velocity = state
    inputs, outputs = layers_of(start, k, activation)
    error = outputs[-1] - v + k if residual else outputs[-1] - v
    signals = signals_of(start, outputs, error, activation)
    rates = damped(theta, start, inputs) if normalized else [theta] * len(start)
    weight, momentum, p, m, r = _shares(1 - alpha, eta, real)
    x, after, speed = q, [], []
    for layer, (w, u, h, d, rate) in enumerate(zip(weights, velocity, inputs, signals, rates, strict=True)):
        if layer:
            x = activate(x, activation)
        scaled = rate[..., None] * d
        x, w, u = _layer(x, w, u, h, scaled, weight, momentum, p, m, r)
        after.append(w)
        speed.append(u)
    return (q + x if residual else x), (start, tuple(after), tuple(speed))


def _layer(
    x: Tensor,
    w: Tensor,
    u: Tensor,
    h: Tensor,
    d: Tensor,
    weight: Tensor,
    momentum: Tensor,
    p: Tensor,
    m: Tensor,
    r: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Read one layer at every token, and move its weights and momentum."""
    z = p[..., None] * (x @ w) + r[..., None] * (x @ u) - (weight * (x @ h.mT)) @ d
    end_p, end_m, end_r = (s[..., -1, None, None] for s in (p, m, r))
    w = end_p * w + end_r * u - (weight[..., -1, :, None] * h).mT @ d
    u = end_m * u - (momentum[..., None] * h).mT @ d
    return z, w, u


def _shares(
    keep: Tensor, eta: Tensor, real: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return how much of write s is in W_t and in the last U, and p, m, r."""
    product, momentum = running_products(keep), running_products(eta)  # [B, G, C, C]
    p, m = product[..., 0] * keep[..., :1], momentum[..., 0] * eta[..., :1]
    # A token that is not real hands its momentum on, but is not moved by it.
    moved = product if real is None else product * real[..., None, :]
    r = (moved @ m[..., None])[..., 0]
    return moved @ momentum, momentum[..., -1, :], p, m, r


def damped(theta: Tensor, start: Weights, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return each layer's rate: the proximal step's, for a bound on the layer's curvature."""
    return [theta / (1 + theta * bend) for bend in bent_by(start, inputs)]
