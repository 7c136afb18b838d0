"""RWKV-7: a memory that erases at one key and writes at another."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from innerloop.checks import Backend, Form
from innerloop.dispatch import call
from innerloop.kernels.families import GENERALIZED_DELTA
from innerloop.kernels.operator import Options
from innerloop.rule import Gate, Rule


class RWKV7(Rule):
    r"""The generalized delta rule: each channel fades and is erased at its own rate, at a key of its own.

    .. math:: S_t = (\mathrm{diag}(e^{g_t}) - (a_t \circ \kappa_t) \kappa_t^\top) S_{t-1} + k_t v_t^\top

    Peng et al. (2025), arXiv:2503.14456, transposed: their state is V by K.
    """

    name = "rwkv7"
    paper = "Peng et al. (2025), arXiv:2503.14456"
    departs = "it erases at kappa and writes at k, one step on no common loss; and it erases from the unfaded memory"
    gates = (
        Gate("g", low=-math.inf, high=0.0, axes=("B", "T", "G", "K"), enforced=True),
        Gate("a", low=0.0, high=1.0, axes=("B", "T", "G", "K")),
        Gate("kappa", low=-1.0, high=1.0, axes=("B", "T", "H", "K")),
    )
    unit_scale = True
    family = GENERALIZED_DELTA

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, a: Tensor, kappa: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Fade every channel, take away a times what the unfaded memory answers at kappa, add the pair, read."""
        answer = torch.einsum("bgkv,bgk->bgv", state, kappa)  # [B, G, V]
        state = g.exp()[..., None] * state - (a * kappa)[..., :, None] * answer[..., None, :]  # [B, G, K, V]
        state = state + k[..., :, None] * v[..., None, :]
        return torch.einsum("bgkv,bgk->bgv", state, q), state

    def chunk(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        g: Tensor,
        a: Tensor,
        kappa: Tensor,
        state: Tensor | None,
        options: Options,
    ) -> tuple[Tensor, Tensor]:
        """Run the family whose erase has a key of its own and looks at the unfaded memory."""
        return GENERALIZED_DELTA(q, k, v, (g, a, kappa), (state,), options)


RULE = RWKV7()


def rwkv7(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    a: Tensor,
    kappa: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    form: Form = "auto",
    chunk_size: int | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Fade each channel, erase at a removal key, add the pair, and read.

    .. math::
        S_t = (\mathrm{diag}(e^{g_t}) - (a_t \circ \kappa_t) \kappa_t^\top) S_{t-1} + k_t v_t^\top, \qquad
        o_t = \mathrm{scale} \cdot S_t^\top q_t

    What is erased is read of the memory before it fades. Peng et al. (2025), arXiv:2503.14456, transposed: their state
    is V by K. The bonus of the current token is the layer's.

    Args:
        q: Queries, ``[B, T, H, K]``.
        k: Keys, ``[B, T, H, K]``, used as given.
        v: Values, ``[B, T, G, V]`` with G a multiple of H; value head h reads key head ``h // (G // H)``.
        g: Natural log of each channel's decay, ``[B, T, G, K]``, at most 0; ``-inf`` clears the channel.
        a: How fast each channel learns in context, ``[B, T, G, K]``. With a unit ``kappa`` and values in [0, 1] the
            eigenvalues of the transition lie in [-1, 1]. Any value is taken but NaN.
        kappa: Removal keys, ``[B, T, H, K]``, used as given: the layer makes them unit length, and
            ``use_qk_l2norm_in_kernel`` leaves them alone. Value head h reads ``h // (G // H)``, as of k.
        scale: Finite number that multiplies the read; 1 if None.
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
        >>> kappa = torch.nn.functional.normalize(k, dim=-1)
        >>> g, a = -torch.rand(1, 100, 2, 8), torch.rand(1, 100, 2, 8)
        >>> o, state = ops.rwkv7(q, k, v, g=g, a=a, kappa=kappa, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    return call(
        RULE,
        q,
        k,
        v,
        {"g": g, "a": a, "kappa": kappa},
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
