"""Longhorn as published: the diagonal of the implicit step."""

from __future__ import annotations

import torch
from torch import Tensor

from innerloop.algebra.delta import proximal_rate
from innerloop.checks import Backend, Form
from innerloop.dispatch import call
from innerloop.kernels.families import DIAGONAL
from innerloop.kernels.operator import Options
from innerloop.rule import Gate, Rule


class LonghornDiagonal(Rule):
    r"""Every entry of the memory fades by the diagonal of Longhorn's transition.

    .. math::
        S_t = S_{t-1} \circ (1 - (k_t \circ k_t) \epsilon_t^\top) + k_t (\epsilon_t \circ v_t)^\top, \qquad
        \epsilon_t = \frac{\beta_t}{1 + \beta_t k_t^\top k_t}

    Liu et al. (2024), arXiv:2407.14207.
    """

    name = "longhorn_diagonal"
    paper = "Liu et al. (2024), arXiv:2407.14207"
    departs = "it keeps only the diagonal of the implicit step's transition, so it solves no problem"
    gates = (
        Gate(
            "beta",
            low=0.0,
            high=torch.finfo(torch.float32).max,
            axes=("B", "T", "G", "V"),
            enforced=True,
            drawn=(0.0, 4.0),
        ),
    )
    chunk_size = 32

    def step(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Fade every entry at its own pace, add the pair, read."""
        rate = proximal_rate(beta, k.square().sum(-1, keepdim=True))  # [B, G, V]
        fade = 1 - k.square()[..., :, None] * rate[..., None, :]  # [B, G, K, V]
        state = fade * state + k[..., :, None] * (rate * v)[..., None, :]
        return torch.einsum("bgkv,bgk->bgv", state, q), state

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor, state: Tensor | None, options: Options
    ) -> tuple[Tensor, Tensor]:
        """Run the diagonal family."""
        return DIAGONAL(q, k, v, (beta,), (state,), options)


RULE = LonghornDiagonal()


def longhorn_diagonal(
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
    r"""Write each pair into a memory whose entries fade by what is written over them, and read.

    .. math::
        S_t = S_{t-1} \circ (1 - (k_t \circ k_t) \epsilon_t^\top) + k_t (\epsilon_t \circ v_t)^\top, \qquad
        \epsilon_t = \frac{\beta_t}{1 + \beta_t k_t^\top k_t}, \qquad
        o_t = \mathrm{scale} \cdot S_t^\top q_t

    Liu et al. (2024), arXiv:2407.14207: their layer, which keeps only the diagonal of what solves their problem
    (``longhorn`` solves it). No two entries fade alike, so the chunk form is no product of matrices: all chunks take
    their steps side by side, at twice the arithmetic of the token loop in far fewer calls.

    Args:
        q: Queries, ``[B, T, H, K]``.
        k: Keys, ``[B, T, H, K]``, used as given.
        v: Values, ``[B, T, G, V]`` with G a multiple of H; value head h reads key head ``h // (G // H)``.
        beta: How much each channel of the value weighs against the memory, ``[B, T, G, V]``, at least 0 and finite.
        scale: Finite number that multiplies the read; K^-1/2 if None.
        initial_state: Memory before the first token, ``[N, G, K, V]``; zeros if None.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of N packed sequences in one row (B=1), ``[N+1]``, int32 or int64.
        use_qk_l2norm_in_kernel: Make q and k unit length first, ``x * rsqrt(sum(x^2) + 1e-6)``.
        form: ``"recurrent"`` (the definition, a token loop), ``"chunk"`` (parallel in time) or ``"auto"``.
        chunk_size: Tokens a chunk; changes nothing beyond rounding. 32 if None.
        backend: ``None`` for the best present, or ``"torch"``.

    Returns:
        ``o`` of ``[B, T, G, V]`` in v's dtype, and the state after the last token (float32, or float64 for float64)
        or None.

    Raises:
        TypeError: If an input is no float tensor, or dtypes differ.
        ValueError: If a shape disagrees with q's, beta is negative, infinite or NaN, or an option is unknown.
        RuntimeError: If a named backend cannot serve.

    Example:
        >>> import torch
        >>> from innerloop import ops
        >>> q, k, v = torch.randn(3, 1, 100, 2, 8).unbind(0)
        >>> o, state = ops.longhorn_diagonal(q, k, v, beta=torch.rand(1, 100, 2, 8), output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 8]), torch.Size([1, 2, 8, 8]))
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
