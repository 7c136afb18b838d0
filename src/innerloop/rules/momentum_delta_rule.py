"""Titans with a linear memory: gradient descent with momentum and forgetting."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from innerloop.checks import Backend, Form
from innerloop.dispatch import call
from innerloop.kernels.families import MOMENTUM
from innerloop.kernels.operator import Options
from innerloop.recipe import GradientStep, LinearMap, Recipe, Uniform
from innerloop.rule import Gate, Rule


class MomentumState(NamedTuple):
    """The memory, and the momentum that still moves it."""

    S: Tensor
    """``[N, G, K, V]``"""
    U: Tensor
    """``[N, G, K, V]``"""


class MomentumDeltaRule(Rule):
    r"""One gradient step a token with momentum and decoupled decay.

    .. math::
        U_t = \eta_t U_{t-1} - \theta_t k_t (S_{t-1}^\top k_t - v_t)^\top, \qquad
        S_t = (1 - \alpha_t) S_{t-1} + U_t

    Behrouz et al. (2024), arXiv:2501.00663, for a linear memory and a loss with 1/2. The error is that of the undecayed
    memory, so with eta = 0 this is not ``gated_delta_rule``.
    """

    name = "momentum_delta_rule"
    paper = "Behrouz et al. (2024), arXiv:2501.00663"
    recipe = Recipe(Uniform(), LinearMap(), GradientStep(rate=None, momentum=None, decay=None))
    gates = (
        Gate("theta", low=0.0, high=1.0, feeds="solver.rate"),
        Gate("eta", low=0.0, high=1.0, feeds="solver.momentum"),
        Gate("alpha", low=0.0, high=1.0, feeds="solver.decay"),
    )
    states: ClassVar = {"S": ("G", "K", "V"), "U": ("G", "K", "V")}
    state_type = MomentumState
    unit_scale = True
    family = MOMENTUM

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, theta: Tensor, eta: Tensor, alpha: Tensor, state: MomentumState
    ) -> tuple[Tensor, MomentumState]:
        """Take the error of the memory as it is, update momentum, forget, move, read."""
        memory, velocity = state
        error = torch.einsum("bgkv,bgk->bgv", memory, k) - v  # [B, G, V]
        velocity = eta[..., None, None] * velocity - k[..., :, None] * (theta[..., None] * error)[..., None, :]
        memory = (1 - alpha)[..., None, None] * memory + velocity
        return torch.einsum("bgkv,bgk->bgv", memory, q), MomentumState(memory, velocity)

    def chunk(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        theta: Tensor,
        eta: Tensor,
        alpha: Tensor,
        state: MomentumState | None,
        options: Options,
    ) -> tuple[Tensor, MomentumState]:
        """Run the momentum family, which is exact."""
        out, *after = MOMENTUM(q, k, v, (theta, eta, alpha), self.state_tensors(state), options)
        return out, MomentumState(*after)


RULE = MomentumDeltaRule()


def momentum_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    theta: Tensor,
    eta: Tensor,
    alpha: Tensor,
    scale: float | None = None,
    initial_state: MomentumState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    form: Form = "auto",
    chunk_size: int | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, MomentumState | None]:
    r"""Write each pair by a gradient step with momentum and forgetting on a linear memory, and read.

    .. math::
        U_t = \eta_t U_{t-1} - \theta_t k_t (S_{t-1}^\top k_t - v_t)^\top, \qquad
        S_t = (1 - \alpha_t) S_{t-1} + U_t, \qquad
        o_t = \mathrm{scale} \cdot S_t^\top q_t

    Behrouz et al. (2024), arXiv:2501.00663, for a linear memory and the loss 1/2 |S^T k - v|^2. A repeated key is
    stable while ``theta |k|^2 < (2 - alpha)(1 + eta)``.

    Args:
        q: Queries, ``[B, T, H, K]``.
        k: Keys, ``[B, T, H, K]``, used as given.
        v: Values, ``[B, T, G, V]`` with G a multiple of H; value head h reads key head ``h // (G // H)``.
        theta: Rate, ``[B, T, G]``, at least 0.
        eta: Momentum, ``[B, T, G]``, in [0, 1].
        alpha: Forgetting, ``[B, T, G]``, in [0, 1]; 0 keeps all.
        scale: Finite number that multiplies the read; 1 if None.
        initial_state: ``MomentumState(S, U)`` before the first token, each ``[N, G, K, V]``; zeros if None.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of N packed sequences in one row (B=1), ``[N+1]``, int32 or int64.
        use_qk_l2norm_in_kernel: Make q and k unit length first, ``x * rsqrt(sum(x^2) + 1e-6)``.
        form: ``"recurrent"`` (the definition, a token loop), ``"chunk"`` (parallel in time) or ``"auto"``.
        chunk_size: Tokens a chunk; changes nothing beyond rounding. 64 if None.
        backend: ``None`` for the best present, ``"torch"``, or ``"cpu"`` for the native kernel.

    Returns:
        ``o`` of ``[B, T, G, V]`` in v's dtype, and ``MomentumState(S, U)`` after the last token (float32, or
        float64 for float64) or None.

    Raises:
        TypeError: If an input is no float tensor, or dtypes differ.
        ValueError: If a shape disagrees with q's, or an option is unknown.
        RuntimeError: If a named backend cannot serve.

    Example:
        >>> import torch
        >>> from innerloop import ops
        >>> q, k, v = torch.randn(3, 1, 100, 2, 8).unbind(0)
        >>> theta, eta, alpha = torch.rand(3, 1, 100, 2).unbind(0)
        >>> o, state = ops.momentum_delta_rule(
        ...     q, k, v, theta=theta, eta=0.5 * eta, alpha=alpha, use_qk_l2norm_in_kernel=True, output_final_state=True
        ... )
        >>> o.shape, state.S.shape, state.U.shape
        (torch.Size([1, 100, 2, 8]), torch.Size([1, 2, 8, 8]), torch.Size([1, 2, 8, 8]))
    """
    return call(
        RULE,
        q,
        k,
        v,
        {"theta": theta, "eta": eta, "alpha": alpha},
        (),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        form=form,
        chunk_size=chunk_size,
        backend=backend,
    )
