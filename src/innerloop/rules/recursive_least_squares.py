"""The exact ridge fit after every token."""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from innerloop.algebra.ridge import ridge_solve
from innerloop.checks import Backend, Form
from innerloop.dispatch import call
from innerloop.kernels.families import RIDGE
from innerloop.kernels.operator import Options
from innerloop.recipe import Exact, LinearMap, Recipe, ScalarDecay
from innerloop.rule import Constant, Gate, Rule


class MomentState(NamedTuple):
    """The two moments of the past: nothing is inverted that is carried, for an inverse overflows under decay."""

    H_kk: Tensor
    """``[N, G, K, K]``"""
    H_kv: Tensor
    """``[N, G, K, V]``"""


class RecursiveLeastSquares(Rule):
    r"""The exact solution of the weighted ridge problem after every token.

    .. math::
        S_t = \arg\min_S \tfrac12 \sum_{i \le t} e^{g_{i+1} + \dots + g_t} |S^\top k_i - v_i|^2
            + \tfrac{\mathrm{ridge}}{2} |S|^2

    The ridge stays while the past fades, unlike that of the textbook recursion, whose inverse covariance overflows.
    """

    name = "recursive_least_squares"
    paper = "as a sequence layer von Oswald et al. (2025), arXiv:2506.05233"
    recipe = Recipe(ScalarDecay(g=0.0), LinearMap(), Exact(ridge=1.0))
    gates = (Gate("g", low=-math.inf, high=0.0, feeds="weights.g", enforced=True, optional=True),)
    states: ClassVar = {"H_kk": ("G", "K", "K"), "H_kv": ("G", "K", "V")}
    state_type = MomentState
    constants = (Constant("ridge", default=1.0, above=0.0),)
    unit_scale = True
    chunk_size = 16

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor | None, ridge: float, state: MomentState
    ) -> tuple[Tensor, MomentState]:
        """Fade both moments, add the pair to both, solve at the query."""
        covariance, cross = (state.H_kk + state.H_kk.mT) / 2, state.H_kv
        if g is not None:
            covariance, cross = g.exp()[..., None, None] * covariance, g.exp()[..., None, None] * cross
        covariance = covariance + k[..., :, None] * k[..., None, :]
        cross = cross + k[..., :, None] * v[..., None, :]
        out = torch.einsum("bgkv,bgk->bgv", cross, ridge_solve(covariance, q, ridge))
        return out, MomentState(covariance, cross)

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor | None, state: MomentState | None, options: Options
    ) -> tuple[Tensor, MomentState]:
        """Solve at all queries of a chunk together, then read as linear attention does."""
        out, *after = RIDGE(q, k, v, (g,), self.state_tensors(state), options)
        return out, MomentState(*after)


RULE = RecursiveLeastSquares()


def recursive_least_squares(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None = None,
    ridge: float = 1.0,
    scale: float | None = None,
    initial_state: MomentState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    form: Form = "auto",
    chunk_size: int | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, MomentState | None]:
    r"""Read the exact ridge fit to the whole weighted past, after every token.

    .. math::
        o_t = \mathrm{scale} \cdot H_{kv}^\top (H_{kk} + \mathrm{ridge}\, I)^{-1} q_t, \qquad
        H_{kk} \leftarrow e^{g_t} H_{kk} + k_t k_t^\top, \qquad
        H_{kv} \leftarrow e^{g_t} H_{kv} + k_t v_t^\top

    The textbook's least squares with forgetting, by Cholesky and with a ridge that does not fade; as a sequence layer
    von Oswald et al. (2025), arXiv:2506.05233.

    Args:
        q: Queries, ``[B, T, H, K]``.
        k: Keys, ``[B, T, H, K]``, used as given.
        v: Values, ``[B, T, G, V]`` with G a multiple of H; value head h reads key head ``h // (G // H)``.
        g: Natural log of the decay, ``[B, T, G]``, at most 0; ``-inf`` clears the memory; no decay if None.
        ridge: Weight of |S|^2, above 0. Errors grow as 1 / ridge: in float32 about eps |H_kk| / ridge.
        scale: Finite number that multiplies the read; 1 if None.
        initial_state: ``MomentState(H_kk, H_kv)`` before the first token, ``[N, G, K, K]`` and ``[N, G, K, V]``; zeros
            if None. H_kk is made symmetric.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of N packed sequences in one row (B=1), ``[N+1]``, int32 or int64.
        use_qk_l2norm_in_kernel: Make q and k unit length first, ``x * rsqrt(sum(x^2) + 1e-6)``.
        form: ``"recurrent"`` (the definition, a token loop), ``"chunk"`` (parallel in time) or ``"auto"``.
        chunk_size: Tokens a chunk; changes nothing beyond rounding. 16 if None.
        backend: ``None`` for the best present, or ``"torch"``.

    Returns:
        ``o`` of ``[B, T, G, V]`` in v's dtype, and ``MomentState(H_kk, H_kv)`` after the last token (float32, or
        float64 for float64) or None.

    Raises:
        TypeError: If an input is no float tensor, or dtypes differ.
        ValueError: If a shape disagrees with q's, g is positive or NaN, ridge is not above 0, or an option is unknown.
        RuntimeError: If a named backend cannot serve.

    Example:
        >>> import torch
        >>> from innerloop import ops
        >>> q, k, v = torch.randn(3, 1, 100, 2, 8).unbind(0)
        >>> o, _ = ops.recursive_least_squares(q, k, v, ridge=0.1)
        >>> fit = torch.linalg.solve(k[0, :, 0].T @ k[0, :, 0] + 0.1 * torch.eye(8), k[0, :, 0].T @ v[0, :, 0])
        >>> torch.allclose(o[0, -1, 0], q[0, -1, 0] @ fit, atol=1e-4)
        True
    """
    return call(
        RULE,
        q,
        k,
        v,
        {"g": g},
        (ridge,),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        form=form,
        chunk_size=chunk_size,
        backend=backend,
    )
