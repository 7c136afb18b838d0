"""Gated DeltaNet-2: what is erased and what is written have gates of their own, channel by channel."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from innerloop.checks import Backend, Form
from innerloop.dispatch import call
from innerloop.kernels.families import DECOUPLED_DELTA
from innerloop.kernels.operator import Options
from innerloop.rule import Gate, Rule


class GatedDeltaNet2(Rule):
    r"""The delta rule with a gate for what is erased and another for what is written.

    .. math:: S_t = (I - k_t (b_t \circ k_t)^\top) \, \mathrm{diag}(e^{g_t}) S_{t-1} + k_t (w_t \circ v_t)^\top

    Hatamizadeh, Choi and Kautz (2026), arXiv:2605.22791.
    """

    name = "gdn2"
    paper = "Hatamizadeh, Choi and Kautz (2026), arXiv:2605.22791"
    departs = "it reads at b * k and writes at k: the step is along the gradient of no loss unless b is one number"
    gates = (
        Gate("g", low=-math.inf, high=0.0, axes=("B", "T", "G", "K"), enforced=True),
        Gate("b", low=0.0, high=2.0, axes=("B", "T", "G", "K")),
        Gate("w", low=0.0, high=2.0, axes=("B", "T", "G", "V")),
    )
    family = DECOUPLED_DELTA

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, b: Tensor, w: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Fade every channel, write at k the gated value less what the faded memory answers at the gated key, read."""
        faded = g.exp()[..., None] * state  # [B, G, K, V]
        update = w * v - torch.einsum("bgkv,bgk->bgv", faded, b * k)  # [B, G, V]
        state = faded + k[..., :, None] * update[..., None, :]
        return torch.einsum("bgkv,bgk->bgv", state, q), state

    def chunk(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        g: Tensor,
        b: Tensor,
        w: Tensor,
        state: Tensor | None,
        options: Options,
    ) -> tuple[Tensor, Tensor]:
        """Run the delta family whose erase and write are decoupled."""
        return DECOUPLED_DELTA(q, k, v, (g, b, w), (state,), options)


RULE = GatedDeltaNet2()


def gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    form: Form = "auto",
    chunk_size: int | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Fade each channel, erase at a gated key, write a gated value, and read.

    .. math::
        S_t = (I - k_t (b_t \circ k_t)^\top) \, \mathrm{diag}(e^{g_t}) S_{t-1} + k_t (w_t \circ v_t)^\top, \qquad
        o_t = \mathrm{scale} \cdot S_t^\top q_t

    Hatamizadeh, Choi and Kautz (2026), arXiv:2605.22791.

    Args:
        q: Queries, ``[B, T, H, K]``.
        k: Keys, ``[B, T, H, K]``, used as given.
        v: Values, ``[B, T, G, V]`` with G a multiple of H; value head h reads key head ``h // (G // H)``.
        g: Natural log of each channel's decay, ``[B, T, G, K]``, at most 0; ``-inf`` clears the channel.
        b: How much of each key channel is erased, ``[B, T, G, K]``. The paper's lies in [0, 1]; up to 2 a unit key's
            eigenvalue stays within [-1, 1]. Any value is taken but NaN.
        w: How much of each value channel is written, ``[B, T, G, V]``. The paper's lies in [0, 1]; any value is taken
            but NaN.
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
        >>> g, b, w = -torch.rand(1, 100, 2, 8), *torch.rand(2, 1, 100, 2, 8)
        >>> o, state = ops.gdn2(q, k, v, g=g, b=b, w=w, use_qk_l2norm_in_kernel=True, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    return call(
        RULE,
        q,
        k,
        v,
        {"g": g, "b": b, "w": w},
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
