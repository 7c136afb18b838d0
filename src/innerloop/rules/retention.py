"""RetNet: an additive memory that fades at a rate of its head."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from innerloop.checks import Backend, Form
from innerloop.dispatch import call
from innerloop.kernels.families import ADDITIVE
from innerloop.kernels.operator import Options
from innerloop.recipe import CrossMoment, LinearMap, Recipe, ScalarDecay
from innerloop.rule import Gate, Gates, Rule
from innerloop.shapes import compute_dtype


class Retention(Rule):
    r"""Least squares with geometric weights, the covariance left out; one decay a head.

    .. math:: S_t = e^{g} S_{t-1} + k_t v_t^\top

    Sun et al. (2023), arXiv:2307.08621.
    """

    name = "retention"
    paper = "Sun et al. (2023), arXiv:2307.08621"
    recipe = Recipe(ScalarDecay(), LinearMap(), CrossMoment())
    gates = (Gate("g", low=-math.inf, high=0.0, feeds="weights.g", enforced=True, axes=("G",), optional=True),)
    family = ADDITIVE

    def complete(self, gates: Gates, v: Tensor) -> Gates:
        """Give every token its head's decay, ``log(1 - 2^(-5-h))`` by default."""
        g = gates["g"]
        if g is None:
            head = torch.arange(v.shape[-2], dtype=torch.float64, device=v.device)
            g = torch.log1p(-torch.exp2(-5 - head)).to(compute_dtype(v.dtype))
        return {"g": g.expand(v.shape[:-1])}

    def step(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Fade the memory, add the pair, read."""
        state = g.exp()[..., None, None] * state + k[..., :, None] * v[..., None, :]  # [B, G, K, V]
        return torch.einsum("bgkv,bgk->bgv", state, q), state

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, state: Tensor | None, options: Options
    ) -> tuple[Tensor, Tensor]:
        """Run the additive family with this decay."""
        return ADDITIVE(q, k, v, (g,), (state,), options)


RULE = Retention()


def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    form: Form = "auto",
    chunk_size: int | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Add every pair to a linear memory that fades at its head's rate, and read it.

    .. math:: S_t = e^{g} S_{t-1} + k_t v_t^\top, \qquad o_t = \mathrm{scale} \cdot S_t^\top q_t

    Sun et al. (2023), arXiv:2307.08621, without their rotations and group norm, which are the layer's.

    Args:
        q: Queries, ``[B, T, H, K]``.
        k: Keys, ``[B, T, H, K]``, used as given.
        v: Values, ``[B, T, G, V]`` with G a multiple of H; value head h reads key head ``h // (G // H)``.
        g: Natural log of each head's decay, ``[G]``, at most 0; ``log(1 - 2^(-5-h))`` for head h if None.
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
        >>> o, _ = ops.retention(q, k, v)
        >>> same, _ = ops.retention(q, k, v, g=torch.tensor([1 - 2**-5, 1 - 2**-6]).log())
        >>> torch.allclose(o, same, atol=1e-5)
        True
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
