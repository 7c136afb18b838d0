"""Gated linear attention: an additive memory each of whose channels fades at its own pace."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from innerloop.checks import Backend, Form
from innerloop.dispatch import call
from innerloop.kernels.families import CHANNEL_ADDITIVE
from innerloop.kernels.operator import Options
from innerloop.recipe import ChannelDecay, CrossMoment, LinearMap, Recipe
from innerloop.rule import Gate, Rule


class GatedLinearAttention(Rule):
    r"""Least squares without the covariance, on a map whose channels fade apart.

    .. math:: S_t = \mathrm{diag}(e^{g_t}) S_{t-1} + k_t v_t^\top

    Yang et al. (2023), arXiv:2312.06635.
    """

    name = "gla"
    paper = "Yang et al. (2023), arXiv:2312.06635"
    recipe = Recipe(ChannelDecay(), LinearMap(), CrossMoment())
    gates = (Gate("g", low=-math.inf, high=0.0, feeds="weights.g", axes=("B", "T", "G", "K"), enforced=True),)
    family = CHANNEL_ADDITIVE

    def step(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Fade every channel, add the pair, read."""
        state = g.exp()[..., None] * state + k[..., :, None] * v[..., None, :]  # [B, G, K, V]
        return torch.einsum("bgkv,bgk->bgv", state, q), state

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, state: Tensor | None, options: Options
    ) -> tuple[Tensor, Tensor]:
        """Run the additive family with a decay by channel."""
        return CHANNEL_ADDITIVE(q, k, v, (g,), (state,), options)


RULE = GatedLinearAttention()


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    form: Form = "auto",
    chunk_size: int | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Fade each channel of a linear memory at its own pace, add the pair, and read.

    .. math:: S_t = \mathrm{diag}(e^{g_t}) S_{t-1} + k_t v_t^\top, \qquad o_t = \mathrm{scale} \cdot S_t^\top q_t

    Yang et al. (2023), arXiv:2312.06635.

    Args:
        q: Queries, ``[B, T, H, K]``.
        k: Keys, ``[B, T, H, K]``, used as given.
        v: Values, ``[B, T, G, V]`` with G a multiple of H; value head h reads key head ``h // (G // H)``.
        g: Natural log of each channel's decay, ``[B, T, G, K]``, at most 0; ``-inf`` clears the channel.
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
        ValueError: If a shape disagrees with q's, g is positive or NaN, or an option is unknown.
        RuntimeError: If a named backend cannot serve.

    Example:
        >>> import torch
        >>> from innerloop import ops
        >>> q, k, v = torch.randn(3, 1, 100, 2, 8).unbind(0)
        >>> o, _ = ops.gla(q, k, v, g=-torch.rand(1, 100, 2, 8))
        >>> o.shape
        torch.Size([1, 100, 2, 8])
    """
    return call(
        RULE,
        q,
        k,
        v,
        {"g": g},
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
