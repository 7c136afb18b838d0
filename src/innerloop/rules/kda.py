"""Kimi Delta Attention: a memory whose channels fade apart, then edits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from innerloop.checks import Backend, Form
from innerloop.dispatch import call
from innerloop.kernels.families import CHANNEL_DELTA
from innerloop.kernels.operator import Options
from innerloop.recipe import ChannelDecay, GradientStep, LinearMap, Recipe
from innerloop.rule import Gate, Rule


class KimiDeltaAttention(Rule):
    r"""One gradient step a token on a map whose channels fade apart first.

    .. math:: S_t = (I - \beta_t k_t k_t^\top) \, \mathrm{diag}(e^{g_t}) S_{t-1} + \beta_t k_t v_t^\top

    Kimi Team (2025), arXiv:2510.26692.
    """

    name = "kda"
    paper = "Kimi Team (2025), arXiv:2510.26692"
    recipe = Recipe(ChannelDecay(), LinearMap(), GradientStep(rate=None))
    gates = (
        Gate("g", low=-math.inf, high=0.0, feeds="weights.g", axes=("B", "T", "G", "K"), enforced=True),
        Gate("beta", low=0.0, high=2.0, feeds="solver.rate"),
    )
    family = CHANNEL_DELTA

    def step(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Fade every channel, correct what the faded memory answers at k by beta times its error, read."""
        faded = g.exp()[..., None] * state  # [B, G, K, V]
        error = v - torch.einsum("bgkv,bgk->bgv", faded, k)  # [B, G, V]
        state = faded + k[..., :, None] * (beta[..., None] * error)[..., None, :]
        return torch.einsum("bgkv,bgk->bgv", state, q), state

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, state: Tensor | None, options: Options
    ) -> tuple[Tensor, Tensor]:
        """Run the delta family with a decay by channel."""
        return CHANNEL_DELTA(q, k, v, (g, beta), (state,), options)


RULE = KimiDeltaAttention()


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
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
    r"""Write each pair by one gradient step on a memory whose channels fade apart first, and read.

    .. math::
        S_t = (I - \beta_t k_t k_t^\top) \, \mathrm{diag}(e^{g_t}) S_{t-1} + \beta_t k_t v_t^\top, \qquad
        o_t = \mathrm{scale} \cdot S_t^\top q_t

    Kimi Team (2025), arXiv:2510.26692.

    Args:
        q: Queries, ``[B, T, H, K]``.
        k: Keys, ``[B, T, H, K]``, used as given.
        v: Values, ``[B, T, G, V]`` with G a multiple of H; value head h reads key head ``h // (G // H)``.
        g: Natural log of each channel's decay, ``[B, T, G, K]``, at most 0; ``-inf`` clears the channel.
        beta: Write strength, ``[B, T, G]``; with unit keys 0 keeps, 1 replaces, 2 reflects.
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
        ValueError: If a shape disagrees with q's, g is positive or a gate is NaN, or an option is unknown.
        RuntimeError: If a named backend cannot serve.

    Example:
        >>> import torch
        >>> from innerloop import ops
        >>> q, k, v = torch.randn(3, 1, 100, 2, 8).unbind(0)
        >>> g, beta = -torch.rand(1, 100, 2, 8), torch.rand(1, 100, 2)
        >>> o, state = ops.kda(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    return call(
        RULE,
        q,
        k,
        v,
        {"g": g, "beta": beta},
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
