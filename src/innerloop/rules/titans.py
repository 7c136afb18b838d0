"""Titans: a deep memory that learns by gradient descent with momentum and forgetting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from innerloop.algebra.deep_momentum import damped, momentum_block
from innerloop.algebra.mlp import ACTIVATIONS, Activation, Weights, apply_mlp, layers_of
from innerloop.arguments import check_choice, check_count, check_flags
from innerloop.checks import Backend, Form
from innerloop.network import NetworkRule
from innerloop.network_call import call, check_tokens, check_weights, per_row, widened
from innerloop.rule import Gate
from innerloop.shapes import compute_dtype


class TitansState(NamedTuple):
    """The memory, its momentum, and where the mini-batch stands in which it is."""

    start: Weights
    """Where the mini-batch began, and its gradients are taken: each ``[N, G, in, out]``."""
    weights: Weights
    """The memory now, alike."""
    momentum: Weights
    """What still moves it, alike."""
    position: Tensor
    """Tokens that each row has seen, int64 ``[N]``."""


class Titans(NetworkRule):
    r"""Gradient descent with momentum and forgetting on a network of any depth.

    .. math::
        U_t = \eta_t U_{t-1} - \theta_t \nabla \tfrac12 |m_{W^0}(k_t) - v_t|^2, \qquad
        W_t = (1 - \alpha_t) W_{t-1} + U_t

    with the gradient at W^0, the weights where the mini-batch began. Behrouz et al. (2024), arXiv:2501.00663.
    """

    name = "titans"
    paper = "Behrouz et al. (2024), arXiv:2501.00663"
    departs = "gradients are taken at the weights of the mini-batch's start, not at those that the step moves"
    gates = (
        Gate("theta", low=0.0, high=1.0),
        Gate("eta", low=0.0, high=1.0),
        Gate("alpha", low=0.0, high=1.0),
    )
    neutral: ClassVar = {"eta": 1.0}
    state_type = TitansState


RULE = Titans()


class _Learner:
    """The inner loop of a call."""

    shaped = 2

    def __init__(
        self, weights: Weights, activation: Activation, residual: bool, normalized: bool, mini_batch: int
    ) -> None:
        """Take the first weights ``[G, in, out]`` and what the network and its solver are."""
        self.weights, self.activation, self.residual, self.normalized = weights, activation, residual, normalized
        self.mini_batches = (mini_batch,)

    def begin(self, rows: int) -> tuple[Weights, Weights, Weights]:
        """Return the first weights as start and memory, and no momentum."""
        first = per_row(self.weights, rows)
        return first, first, tuple(torch.zeros_like(w) for w in first)

    def step(
        self, token: Sequence[Tensor], parts: tuple[Weights, Weights, Weights], position: Tensor
    ) -> tuple[Tensor, tuple[Weights, Weights, Weights]]:
        """Take the loss's gradient by autograd, update momentum, forget, move, read."""
        q, k, v, theta, eta, alpha = token
        start, weights, velocity = parts

        def loss(start: Weights) -> Tensor:
            return 0.5 * (self._of(start, k) - v).square().sum()

        slopes = torch.func.grad(loss)(start)
        rates = [theta] * len(start)
        if self.normalized:
            inputs, _ = layers_of(start, k[..., None, :], self.activation)
            rates = [rate[..., 0] for rate in damped(theta[..., None], start, inputs)]
        velocity = tuple(
            eta[..., None, None] * u - rate[..., None, None] * slope
            for u, rate, slope in zip(velocity, rates, slopes, strict=True)
        )
        weights = tuple((1 - alpha)[..., None, None] * w + u for w, u in zip(weights, velocity, strict=True))
        return self._of(weights, q), (start, weights, velocity)

    def _of(self, weights: Weights, x: Tensor) -> Tensor:
        return apply_mlp(weights, x[..., None, :], self.activation, self.residual)[..., 0, :]

    def block(
        self, tokens: Sequence[Tensor], parts: tuple[Weights, Weights, Weights], real: Tensor | None, place: int
    ) -> tuple[Tensor, tuple[Weights, Weights, Weights]]:
        """Do the same for many tokens at once."""
        del place
        return momentum_block(tokens, parts, real, self.activation, self.residual, self.normalized)

    def turn(self, parts: tuple[Weights, Weights, Weights], index: int) -> tuple[Weights, Weights, Weights]:
        """Begin a mini-batch at the memory as it is."""
        del index
        return parts[1], parts[1], parts[2]


def titans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    theta: Tensor,
    eta: Tensor,
    alpha: Tensor,
    weights: Weights,
    activation: Activation = "gelu",
    residual: bool = False,
    normalize_step: bool = False,
    mini_batch: int = 64,
    scale: float | None = None,
    initial_state: TitansState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    form: Form = "auto",
    chunk_size: int | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, TitansState | None]:
    r"""Write each pair into a network by a gradient step with momentum and forgetting, and read.

    .. math::
        U_t = \eta_t U_{t-1} - \theta_t \nabla \tfrac12 |m_{W^0}(k_t) - v_t|^2, \qquad
        W_t = (1 - \alpha_t) W_{t-1} + U_t, \qquad
        o_t = \mathrm{scale} \cdot m_{W_t}(q_t)

    with :math:`m_W(x) = a(\dots a(x W_1) \dots) W_L` and W^0 the weights where the token's mini-batch began. Behrouz et
    al. (2024), arXiv:2501.00663, with 1/2 in the loss; each token has its own gates and reads its own W_t.

    Args:
        q: Queries, ``[B, T, H, K]``.
        k: Keys, ``[B, T, H, K]``, used as given.
        v: Values, ``[B, T, G, V]`` with G a multiple of H; value head h reads key head ``h // (G // H)``.
        theta: Rate, ``[B, T, G]``, at least 0; above about ``2 (1 - eta) / mini_batch`` over the network's curvature a
            repeated key diverges.
        eta: Momentum, ``[B, T, G]``, in [0, 1].
        alpha: Forgetting, ``[B, T, G]``, in [0, 1]; 0 keeps all.
        weights: First weights ``(W1, ..., WL)``, ``[G, K, .]`` to ``[G, ., V]``; used where no state is given.
        activation: Between layers: ``"gelu"``, ``"gelu_tanh"``, ``"silu"`` or ``"relu"``.
        residual: Whether the network adds its input, which then has as many channels as its output.
        normalize_step: Divide each layer's rate by ``1 + theta c``, c a bound on the loss's curvature in that layer:
            ``|h|^2`` of its input times the squared norms of all later weights.
        mini_batch: Tokens whose gradients are taken at the same weights; counted from the sequence's first token.
        scale: Finite number that multiplies the read; 1 if None.
        initial_state: ``TitansState(start, weights, momentum, position)`` before the first token.
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
        >>> q, k, v = torch.randn(3, 1, 100, 2, 8).unbind(0)
        >>> theta, eta, alpha = torch.rand(3, 1, 100, 2).unbind(0)
        >>> weights = (torch.randn(2, 8, 16) / 8**0.5, torch.zeros(2, 16, 8))
        >>> o, state = ops.titans(
        ...     q, k, v, theta=theta / 64, eta=0.5 * eta, alpha=0.1 * alpha, weights=weights,
        ...     use_qk_l2norm_in_kernel=True, output_final_state=True,
        ... )
        >>> o.shape, [w.shape for w in state.weights], state.position
        (torch.Size([1, 100, 2, 8]), [torch.Size([1, 2, 8, 16]), torch.Size([1, 2, 16, 8])], tensor([100]))
    """
    tokens = {"q": q, "k": k, "v": v, "theta": theta, "eta": eta, "alpha": alpha}
    sizes = check_tokens(RULE, tokens, cu_seqlens)
    check_choice("activation", activation, ACTIVATIONS)
    check_flags(residual=residual, normalize_step=normalize_step)
    check_count("mini_batch", mini_batch)
    check_weights("weights", weights, _axes(weights), sizes, q)
    if residual and sizes["K"] != sizes["V"]:
        raise ValueError(f"residual=True adds input to output: V must equal K={sizes['K']}; got {sizes['V']}")
    learner = _Learner(
        widened(weights, compute_dtype(v.dtype)), activation, residual, normalize_step, int(mini_batch)
    )
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


def _axes(weights: Weights) -> list[tuple[str, ...]]:
    """Return the axes of each layer's weights, whose number is the caller's to choose."""
    depth = len(weights) if isinstance(weights, tuple | list) else 0
    if depth < 1:
        raise ValueError(f"weights must be a tuple (W1, ..., WL) of at least one tensor; got {type(weights).__name__}"
                         + (" of none" if isinstance(weights, tuple | list) else ""))  # fmt: skip
    widths = ["K", *(f"h{layer}" for layer in range(1, depth)), "V"]
    return [("G", widths[layer], widths[layer + 1]) for layer in range(depth)]
