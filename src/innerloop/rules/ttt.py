"""Test-time training: a small network trained by mini-batches of the sequence it is reading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from innerloop.algebra.normed_fit import apply_biased, fit_block, norm, settled
from innerloop.arguments import check_count
from innerloop.checks import Backend, Form
from innerloop.network import NetworkRule
from innerloop.network_call import call, check_parameter, check_tokens, check_weights, per_row, widened
from innerloop.rule import Gate
from innerloop.shapes import compute_dtype

Weights = tuple[Tensor, ...]


class TTTState(NamedTuple):
    """The network where its mini-batch began, and what the mini-batch has found so far."""

    start: Weights
    """(W, b) or (W1, b1, W2, b2), weights ``[N, G, in, out]``, biases ``[N, G, out]``."""
    accumulated: Weights
    """The sum of the mini-batch's gradients so far, each times its rate, alike."""
    position: Tensor
    """Tokens that each row has seen, int64 ``[N]``."""


class TTT(NetworkRule):
    r"""Mini-batch gradient descent on the normed output's distance to v - k.

    .. math::
        W_i = W^0 - \max(\tfrac1i + p_i, 0) \sum_{j \le i} lr_j \nabla \tfrac12 |LN(f_{W^0}(k_j)) - (v_j - k_j)|^2

    for token i = 1, 2, ... of a mini-batch that began at W^0. Sun et al. (2024), arXiv:2407.04620.
    """

    name = "ttt"
    paper = "Sun et al. (2024), arXiv:2407.04620"
    departs = "the factor 1/i weighs all earlier gradients of a mini-batch anew: no step leads from one W to the next"
    gates = (Gate("lr", low=0.0, high=1.0),)
    neutral: ClassVar = {}
    state_type = TTTState


RULE = TTT()


class _Learner:
    """The inner loop of a call."""

    shaped = 2

    def __init__(self, weights: Weights, norm_weight: Tensor, norm_bias: Tensor, factor: Tensor) -> None:
        """Take the first weights, the norm's, and what multiplies the sum of gradients at each place ``[C]``."""
        self.weights, self.norm_weight, self.norm_bias, self.factor = weights, norm_weight, norm_bias, factor
        self.mini_batches = (factor.shape[0],)

    def begin(self, rows: int) -> tuple[Weights, Weights]:
        """Return the first weights, and nothing found."""
        first = per_row(self.weights, rows)
        return first, tuple(torch.zeros_like(w) for w in first)

    def step(
        self, token: Sequence[Tensor], parts: tuple[Weights, Weights], position: Tensor
    ) -> tuple[Tensor, tuple[Weights, Weights]]:
        """Take the loss's gradient by autograd, add it to the others, read through what all of them make."""
        q, k, v, lr = token
        start, total = parts

        def loss(start: Weights) -> Tensor:
            return 0.5 * (self._normed(start, k) - (v - k)).square().sum()

        slopes = torch.func.grad(loss)(start)
        total = tuple(x + _like(lr, x) * slope for x, slope in zip(total, slopes, strict=True))
        factor = self.factor[position % self.factor.shape[0]][:, None]  # [B, 1]
        weights = tuple(w - _like(factor, w) * x for w, x in zip(start, total, strict=True))
        return q + self._normed(weights, q), (start, total)

    def _normed(self, weights: Weights, x: Tensor) -> Tensor:
        return norm(apply_biased(weights, x[..., None, :]), self.norm_weight, self.norm_bias)[..., 0, :]

    def block(
        self, tokens: Sequence[Tensor], parts: tuple[Weights, Weights], real: Tensor | None, place: int
    ) -> tuple[Tensor, tuple[Weights, Weights]]:
        """Do the same for many tokens at once."""
        del real
        first = place % self.factor.shape[0]
        factor = self.factor[first : first + tokens[0].shape[2]]
        return fit_block(tokens, parts, factor, self.norm_weight, self.norm_bias)

    def turn(self, parts: tuple[Weights, Weights], index: int) -> tuple[Weights, Weights]:
        """Keep what the mini-batch's last token saw, and begin the next sum."""
        del index
        return settled(parts, self.factor[-1])


def _like(x: Tensor, weight: Tensor) -> Tensor:
    return x.view(*x.shape, *(1,) * (weight.ndim - 2))


def ttt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lr: Tensor,
    weights: Weights,
    norm_weight: Tensor,
    norm_bias: Tensor,
    position_offset: Tensor | None = None,
    mini_batch: int = 16,
    scale: float | None = None,
    initial_state: TTTState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    form: Form = "auto",
    chunk_size: int | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, TTTState | None]:
    r"""Train a small network on each mini-batch of pairs while it is read, and read.

    .. math::
        W_i = W^0 - \max(\tfrac1i + p_i, 0) \sum_{j \le i} lr_j \nabla \tfrac12 |LN(f_{W^0}(k_j)) - (v_j - k_j)|^2,
        \qquad o_i = \mathrm{scale} \cdot (q_i + LN(f_{W_i}(q_i)))

    for token i = 1, 2, ... of a mini-batch that began at W^0; the next begins at the W of its last token. f is
    ``x W + b``, or ``gelu_tanh(x W1 + b1) W2 + b2``. Sun et al. (2024), arXiv:2407.04620, whose published code moves
    the residual into the target and adds 1e-6 to the norm's variance.

    Args:
        q: Queries, ``[B, T, H, K]``.
        k: Keys, ``[B, T, H, K]``, used as given.
        v: Values, ``[B, T, G, V]`` with V = K and G a multiple of H; value head h reads key head ``h // (G // H)``.
        lr: Rate of each token's gradient, ``[B, T, G]``, at least 0; in the paper base * sigmoid / K.
        weights: First weights (W, b) or (W1, b1, W2, b2), ``[G, in, out]`` and ``[G, out]``; used where no state is
            given.
        norm_weight: Of the layer norm, ``[G, V]``.
        norm_bias: Of the layer norm, ``[G, V]``.
        position_offset: What is learned on top of 1/i, ``[mini_batch]``; 0 if None.
        mini_batch: Tokens whose gradients are taken at the same weights; counted from the sequence's first token.
        scale: Finite number that multiplies the read; 1 if None.
        initial_state: ``TTTState(start, accumulated, position)`` before the first token.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of N packed sequences in one row (B=1), ``[N+1]``, int32 or int64.
        use_qk_l2norm_in_kernel: Make q and k unit length first, ``x * rsqrt(sum(x^2) + 1e-6)``.
        form: ``"recurrent"`` (the definition, a token loop), ``"chunk"`` (parallel in time) or ``"auto"``.
        chunk_size: The most tokens of a mini-batch that are taken at once; changes nothing beyond rounding. 128 if
            None.
        backend: ``None`` for the best present, or ``"torch"``.

    Returns:
        ``o`` of ``[B, T, G, V]`` in v's dtype, and the state after the last token (float32, or float64 for float64) or
        None.

    Raises:
        TypeError: If an input is no float tensor, or dtypes differ.
        ValueError: If a shape disagrees with q's, a gate holds NaN, or an option is unknown.
        RuntimeError: If a named backend cannot serve.

    Example:
        >>> import torch
        >>> from innerloop import ops
        >>> q, k, v = torch.randn(3, 1, 40, 2, 8).unbind(0)
        >>> o, state = ops.ttt(
        ...     q, k, v, lr=torch.rand(1, 40, 2) / 8, weights=(torch.randn(2, 8, 8) / 50, torch.zeros(2, 8)),
        ...     norm_weight=torch.ones(2, 8), norm_bias=torch.zeros(2, 8), output_final_state=True,
        ... )
        >>> o.shape, state.start[0].shape, state.position % 16
        (torch.Size([1, 40, 2, 8]), torch.Size([1, 2, 8, 8]), tensor([8]))
    """
    tokens = {"q": q, "k": k, "v": v, "lr": lr}
    sizes = check_tokens(RULE, tokens, cu_seqlens)
    check_count("mini_batch", mini_batch)
    if sizes["K"] != sizes["V"]:
        raise ValueError(f"the target is v - k: V must equal K={sizes['K']}; got {sizes['V']}")
    _check_depth(weights)
    last = [("G", "K" if len(weights) == 2 else "h", "V"), ("G", "V")]
    axes = last if len(weights) == 2 else [("G", "K", "h"), ("G", "h"), *last]
    check_weights("weights", weights, axes, sizes, q)
    check_parameter("norm_weight", norm_weight, ("G", "V"), sizes, q)
    check_parameter("norm_bias", norm_bias, ("G", "V"), sizes, q)
    dtype = compute_dtype(v.dtype)
    factor = 1 / torch.arange(1, mini_batch + 1, dtype=dtype, device=q.device)
    if position_offset is not None:
        check_parameter("position_offset", position_offset, ("mini_batch",), {"mini_batch": mini_batch}, q)
        factor = (factor + position_offset.to(dtype)).clamp(min=0)
    learner = _Learner(widened(weights, dtype), norm_weight.to(dtype), norm_bias.to(dtype), factor)
    return call(
        RULE,
        tokens,
        learner,
        sizes,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        form=form,
        chunk_size=chunk_size,
        backend=backend,
    )


def _check_depth(weights: Weights) -> None:
    if not isinstance(weights, tuple | list):
        raise TypeError(f"weights must be a tuple of tensors; got {type(weights).__name__}")
    if len(weights) not in (2, 4):
        raise ValueError(f"weights must be (W, b) or (W1, b1, W2, b2); got {len(weights)} tensors")
