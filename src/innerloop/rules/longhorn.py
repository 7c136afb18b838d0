"""Longhorn: the delta rule whose step is the solution of its own problem."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from innerloop.algebra.delta import proximal_rate
from innerloop.checks import Backend, Form
from innerloop.dispatch import call
from innerloop.kernels.families import PROXIMAL_DELTA
from innerloop.kernels.operator import Options
from innerloop.recipe import ImplicitStep, LinearMap, Recipe, Uniform
from innerloop.rule import Gate, Rule


class Longhorn(Rule):
    r"""One implicit (proximal) step a token on a map that never fades.

    .. math::
        S_t = \arg\min_S |S - S_{t-1}|^2 + \beta_t |S^\top k_t - v_t|^2
            = S_{t-1} + \Delta_t k_t (v_t - S_{t-1}^\top k_t)^\top, \qquad
        \Delta_t = \frac{\beta_t}{1 + \beta_t k_t^\top k_t}

    Liu et al. (2024), arXiv:2407.14207.
    """

    name = "longhorn"
    paper = "Liu et al. (2024), arXiv:2407.14207"
    recipe = Recipe(Uniform(), LinearMap(), ImplicitStep(strength=None))
    gates = (Gate("beta", low=0.0, high=math.inf, feeds="solver.strength", enforced=True),)
    family = PROXIMAL_DELTA

    def step(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Write by the step that solves the token's problem exactly, read."""
        rate = proximal_rate(beta, k.square().sum(-1))  # [B, G]
        error = v - torch.einsum("bgkv,bgk->bgv", state, k)  # [B, G, V]
        state = state + k[..., :, None] * (rate[..., None] * error)[..., None, :]
        return torch.einsum("bgkv,bgk->bgv", state, q), state

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor, state: Tensor | None, options: Options
    ) -> tuple[Tensor, Tensor]:
        """Run the delta family at the rate that solves each token's problem."""
        return PROXIMAL_DELTA(q, k, v, (beta,), (state,), options)


RULE = Longhorn()


def longhorn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    form: Form = "auto",
    chunk_size: int | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Write each pair by the exact solution of its proximal problem, and read.

    .. math::
        S_t = S_{t-1} + \Delta_t k_t (v_t - S_{t-1}^\top k_t)^\top, \qquad
        \Delta_t = \frac{\beta_t}{1 + \beta_t k_t^\top k_t}, \qquad
        o_t = \mathrm{scale} \cdot S_t^\top q_t

    Liu et al. (2024), arXiv:2407.14207: their equation before they keep only its diagonal.

    Args:
        q: Queries, ``[B, T, H, K]``.
        k: Keys, ``[B, T, H, K]``, used as given.
        v: Values, ``[B, T, G, V]`` with G a multiple of H; value head h reads key head ``h // (G // H)``.
        beta: How much the pair weighs against the memory, ``[B, T, G]``, in [0, inf]; inf overwrites exactly.
        scale: Finite number that multiplies the read; K^-1/2 if None.
        initial_state: Memory before the first token, ``[N, G, K, V]``; zeros if None.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of N packed sequences in one row (B=1), ``[N+1]``, int32 or int64.
        use_qk_l2norm_in_kernel: Make q and k unit length first, ``x * rsqrt(sum(x^2) + 1e-6)``.
        form: ``"recurrent"`` (the definition, a token loop), ``"chunk"`` (parallel in time) or ``"auto"``.
        chunk_size: Tokens a chunk; changes nothing beyond rounding. 64 if None.
        backend: ``None`` for the best present, ``"torch"``, or ``"cpu"`` for the native kernel.

    Returns:
        ``o`` of ``[B, T, G, V]`` in v's dtype, and the state after the last token (float32, or float64 for float64)
        or None.

    Raises:
        TypeError: If an input is no float tensor, or dtypes differ.
        ValueError: If a shape disagrees with q's, beta is negative or NaN, or an option is unknown.
        RuntimeError: If a named backend cannot serve.

    Example:
        >>> import torch
        >>> from innerloop import ops
        >>> q, k, v = torch.randn(3, 1, 100, 2, 8).unbind(0)
        >>> beta = torch.full((1, 100, 2), torch.inf)
        >>> o, _ = ops.longhorn(k, k, v, beta=beta, scale=1.0)
        >>> torch.allclose(o, v, atol=1e-3)  # an infinite weight overwrites
        True
    """
    return call(
        RULE,
        q,
        k,
        v,
        {"beta": beta},
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
