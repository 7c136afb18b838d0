"""DeltaNet: a memory that reads before it writes."""

from __future__ import annotations

import torch
from torch import Tensor

from innerloop.checks import Backend, Form
from innerloop.dispatch import call
from innerloop.kernels.families import DELTA
from innerloop.kernels.operator import Options
from innerloop.recipe import GradientStep, LinearMap, Recipe, Uniform
from innerloop.rule import Gate, Rule


class DeltaRule(Rule):
    r"""One gradient step a token on a map that never fades.

    .. math:: S_t = S_{t-1} + \beta_t k_t (v_t - S_{t-1}^\top k_t)^\top

    Schlag et al. (2021), arXiv:2102.11174; Yang et al. (2024), arXiv:2406.06484, transposed: their state is V by K.
    """

    name = "delta_rule"
    paper = "Schlag et al. (2021), arXiv:2102.11174; Yang et al. (2024), arXiv:2406.06484"
    recipe = Recipe(Uniform(), LinearMap(), GradientStep(rate=None))
    gates = (Gate("beta", low=0.0, high=2.0, feeds="solver.rate"),)
    family = DELTA

    def step(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Correct what the memory answers at k by beta times its error, read."""
        error = v - torch.einsum("bgkv,bgk->bgv", state, k)  # [B, G, V]
        state = state + k[..., :, None] * (beta[..., None] * error)[..., None, :]
        return torch.einsum("bgkv,bgk->bgv", state, q), state

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor, state: Tensor | None, options: Options
    ) -> tuple[Tensor, Tensor]:
        """Run the delta family without decay."""
        return DELTA(q, k, v, (None, beta), (state,), options)


RULE = DeltaRule()


def delta_rule(
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
    r"""Write each pair by one gradient step on what the memory gets wrong, and read.

    .. math:: S_t = S_{t-1} + \beta_t k_t (v_t - S_{t-1}^\top k_t)^\top, \qquad o_t = \mathrm{scale} \cdot S_t^\top q_t

    Schlag et al. (2021), arXiv:2102.11174; Yang et al. (2024), arXiv:2406.06484, transposed: their state is V by K.

    Args:
        q: Queries, ``[B, T, H, K]``.
        k: Keys, ``[B, T, H, K]``, used as given.
        v: Values, ``[B, T, G, V]`` with G a multiple of H; value head h reads key head ``h // (G // H)``.
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
        ValueError: If a shape disagrees with q's, or an option is unknown.
        RuntimeError: If a named backend cannot serve.

    Example:
        >>> import torch
        >>> from innerloop import ops
        >>> q, k, v = torch.randn(3, 1, 100, 2, 8).unbind(0)
        >>> beta = torch.ones(1, 100, 2)
        >>> o, _ = ops.delta_rule(k, k, v, beta=beta, scale=1.0, use_qk_l2norm_in_kernel=True)
        >>> torch.allclose(o, v, atol=1e-4)  # what was just written is what is read
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
