"""Mesa: the ridge fit after every token, by conjugate gradients."""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from innerloop.algebra.mesa import mesa_solve
from innerloop.checks import Backend, Form
from innerloop.dispatch import call
from innerloop.kernels.families import MESA
from innerloop.kernels.operator import Options
from innerloop.recipe import ConjugateGradients, LinearMap, Recipe, WeightedDecay
from innerloop.rule import Constant, Gate, Gates, Rule

_REAL = torch.finfo(torch.float32)


class MesaState(NamedTuple):
    """The two moments of the past."""

    H_kk: Tensor
    """``[N, G, K, K]``"""
    H_kv: Tensor
    """``[N, G, K, V]``"""


class Mesa(Rule):
    r"""The weighted ridge problem of every token, solved by a stated number of conjugate gradients.

    .. math::
        S_t = \arg\min_S \tfrac12 \sum_{i \le t} e^{g_{i+1} + \dots + g_t} \beta_i |S^\top k_i - v_i|^2
            + \tfrac12 \textstyle\sum_c \lambda_c |S_c|^2

    Von Oswald et al. (2025), arXiv:2506.05233.
    """

    name = "mesa"
    paper = "von Oswald et al. (2025), arXiv:2506.05233"
    recipe = Recipe(WeightedDecay(g=0.0), LinearMap(), ConjugateGradients(ridge=None))
    gates = (
        Gate(
            "lamb",
            low=_REAL.tiny,
            high=_REAL.max,
            feeds="solver.ridge",
            axes=("G", "K"),
            enforced=True,
            drawn=(0.25, 4.0),
        ),
        Gate("g", low=-math.inf, high=0.0, feeds="weights.g", optional=True, enforced=True),
        Gate("beta", low=0.0, high=_REAL.max, feeds="weights.weight", optional=True, enforced=True, drawn=(0.0, 2.0)),
    )
    states: ClassVar = {"H_kk": ("G", "K", "K"), "H_kv": ("G", "K", "V")}
    state_type = MesaState
    constants = (Constant("iterations", default=30, above=0, whole=True, drawn_by_width=2),)
    unit_scale = True

    def complete(self, gates: Gates, v: Tensor) -> Gates:
        """Give every token its head's ridge."""
        lamb = gates["lamb"]
        return {**gates, "lamb": lamb.expand(*v.shape[:-1], lamb.shape[-1])}

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        lamb: Tensor,
        g: Tensor | None,
        beta: Tensor | None,
        iterations: float,
        state: MesaState,
    ) -> tuple[Tensor, MesaState]:
        """Fade both moments, add the pair to both, solve at the query, read."""
        covariance, cross = (state.H_kk + state.H_kk.mT) / 2, state.H_kv
        if g is not None:
            covariance, cross = g.exp()[..., None, None] * covariance, g.exp()[..., None, None] * cross
        written = k if beta is None else beta[..., None] * k
        covariance = covariance + written[..., :, None] * k[..., None, :]
        cross = cross + written[..., :, None] * v[..., None, :]
        out = torch.einsum("bgkv,bgk->bgv", cross, mesa_solve(covariance, q, lamb, iterations))
        return out, MesaState(covariance, cross)

    def chunk(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        lamb: Tensor,
        g: Tensor | None,
        beta: Tensor | None,
        state: MesaState | None,
        options: Options,
    ) -> tuple[Tensor, MesaState]:
        """Solve at all queries together, then read as linear attention does."""
        out, *after = MESA(q, k, v, (lamb, g, beta), self.state_tensors(state), options)
        return out, MesaState(*after)


RULE = Mesa()


def mesa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lamb: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    iterations: int = 30,
    scale: float | None = None,
    initial_state: MesaState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    form: Form = "auto",
    chunk_size: int | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, MesaState | None]:
    r"""Read the ridge fit to the whole weighted past, after every token, by conjugate gradients.

    .. math::
        o_t = \mathrm{scale} \cdot H_{kv}^\top (H_{kk} + \mathrm{diag}\, \lambda)^{-1} q_t, \qquad
        H_{kk} \leftarrow e^{g_t} H_{kk} + \beta_t k_t k_t^\top, \qquad
        H_{kv} \leftarrow e^{g_t} H_{kv} + \beta_t k_t v_t^\top

    Von Oswald et al. (2025), arXiv:2506.05233. Every token takes the same number of steps from ``q`` over the diagonal,
    in units of lamb: K of them to the solution but for rounding, fewer where the past points few ways. The gradient is
    that of the solution, not of the steps: with few of them it is as far from the steps' own as they are from the
    solution.

    Args:
        q: Queries, ``[B, T, H, K]``.
        k: Keys, ``[B, T, H, K]``, used as given.
        v: Values, ``[B, T, G, V]`` with G a multiple of H; value head h reads key head ``h // (G // H)``.
        lamb: Ridge of every head and key channel, ``[G, K]``, at least 1.2e-38; below about eps |H_kk| (in float32
            1e-7 of it) rounding leaves no digit of the answer, and far below that NaN.
        g: Natural log of the decay, ``[B, T, G]``, at most 0; ``-inf`` clears the memory; no decay if None.
        beta: Weight of the pair, ``[B, T, G]``, at least 0; 1 if None.
        iterations: Steps of conjugate gradients, at least 1.
        scale: Finite number that multiplies the read; 1 if None.
        initial_state: ``MesaState(H_kk, H_kv)`` before the first token, ``[N, G, K, K]`` and ``[N, G, K, V]``; zeros
            if None. H_kk is made symmetric.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of N packed sequences in one row (B=1), ``[N+1]``, int32 or int64.
        use_qk_l2norm_in_kernel: Make q and k unit length first, ``x * rsqrt(sum(x^2) + 1e-6)``.
        form: ``"recurrent"`` (the definition, a token loop), ``"chunk"`` (parallel in time) or ``"auto"``.
        chunk_size: Tokens a chunk; changes nothing beyond rounding. 64 if None.
        backend: ``None`` for the best present, or ``"torch"``.

    Returns:
        ``o`` of ``[B, T, G, V]`` in v's dtype, and ``MesaState(H_kk, H_kv)`` after the last token (float32, or
        float64 for float64) or None.

    Raises:
        TypeError: If an input is no float tensor, or dtypes differ.
        ValueError: If a shape disagrees with q's, g is positive or NaN, lamb is below 1.2e-38, beta is negative,
            or an option is unknown.
        RuntimeError: If a named backend cannot serve.

    Example:
        >>> import torch
        >>> from innerloop import ops
        >>> q, k, v = torch.randn(3, 1, 100, 2, 8).unbind(0)
        >>> lamb = 0.1 + torch.rand(2, 8)
        >>> o, _ = ops.mesa(q, k, v, lamb=lamb)
        >>> fit = torch.linalg.solve(k[0, :, 0].T @ k[0, :, 0] + lamb[0].diag(), k[0, :, 0].T @ v[0, :, 0])
        >>> torch.allclose(o[0, -1, 0], q[0, -1, 0] @ fit, atol=1e-4)
        True
    """
    return call(
        RULE,
        q,
        k,
        v,
        {"lamb": lamb, "g": g, "beta": beta},
        (iterations,),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        form=form,
        chunk_size=chunk_size,
        backend=backend,
    )
