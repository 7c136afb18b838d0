"""Softmax attention: a memory that keeps every pair."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from innerloop.algebra.attention import remember
from innerloop.checks import Backend, Form
from innerloop.dispatch import call
from innerloop.kernels.families import ATTENTION
from innerloop.kernels.operator import Options
from innerloop.recipe import Exact, KernelSmoother, QueryKernel, Recipe
from innerloop.rule import Constant, Rule
from innerloop.shapes import align_heads


class AttentionState(NamedTuple):
    """All pairs so far, padded; what a row holds beyond its length is never read."""

    keys: Tensor
    """``[N, S, H, K]``"""
    values: Tensor
    """``[N, S, H, V]``"""
    lengths: Tensor
    """How many pairs each row keeps, int64 ``[N]``."""


class SoftmaxAttention(Rule):
    r"""The Nadaraya-Watson estimator at the query: exact, and as large as the past.

    .. math:: o_t = \frac{\sum_{i \le t} e^{q_t^\top k_i} v_i}{\sum_{i \le t} e^{q_t^\top k_i}}

    Vaswani et al. (2017), arXiv:1706.03762; as regression Wang, Shi and Fox (2025), arXiv:2501.12352.
    """

    name = "softmax_attention"
    paper = "Vaswani et al. (2017), arXiv:1706.03762"
    recipe = Recipe(QueryKernel(), KernelSmoother(), Exact())
    states: ClassVar = {"keys": ("S", "H", "K"), "values": ("S", "H", "V"), "lengths": ()}
    state_type = AttentionState
    axes: ClassVar = {"q": ("B", "T", "Q", "K"), "k": ("B", "T", "H", "K"), "v": ("B", "T", "H", "V")}
    constants = (Constant("window", default=0, above=-1, whole=True),)
    grouped = True
    grows = True

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, window: float = 0, state: AttentionState
    ) -> tuple[Tensor, AttentionState]:
        """Keep the pair, read the mean of the values under the softmax of the scores."""
        state = AttentionState(*remember(k[:, None], v[:, None], state))
        keys, values = (align_heads(x, q.shape[-2]) for x in (state.keys, state.values))  # [B, S, Q, .]
        place = torch.arange(keys.shape[1], device=q.device)
        beyond = place >= state.lengths[:, None]  # [B, S]
        if window:
            beyond |= place < state.lengths[:, None] - min(window, keys.shape[1])
        scores = torch.einsum("bgk,bsgk->bgs", q, keys).masked_fill(beyond[:, None], -torch.inf)
        return torch.einsum("bgs,bsgv->bgv", scores.softmax(-1), values), state

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, *, state: AttentionState | None, options: Options
    ) -> tuple[Tensor, AttentionState]:
        """Run attention over all queries at once; there is no chunk to size."""
        out, *after = ATTENTION(q, k, v, (), self.state_tensors(state), options)
        return out, AttentionState(*after)


RULE = SoftmaxAttention()


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int = 0,
    scale: float | None = None,
    initial_state: AttentionState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    form: Form = "auto",
    chunk_size: int | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, AttentionState | None]:
    r"""Read the mean of all values so far, weighted by the softmax of the scores of their keys.

    .. math::
        o_t = \frac{\sum_{i \le t} e^{\mathrm{scale} \cdot q_t^\top k_i} v_i}
        {\sum_{i \le t} e^{\mathrm{scale} \cdot q_t^\top k_i}}

    Vaswani et al. (2017), arXiv:1706.03762; as the Nadaraya-Watson estimator Wang, Shi and Fox (2025),
    arXiv:2501.12352. A window lets i run from t - window + 1 (Beltagy et al., 2020, arXiv:2004.05150).

    Args:
        q: Queries, ``[B, T, Q, K]`` with Q a multiple of H; query head h reads key head ``h // (Q // H)``.
        k: Keys, ``[B, T, H, K]``.
        v: Values, ``[B, T, H, V]``.
        window: How many tokens a query looks back on, itself among them; 0 for all. The state keeps every pair.
        scale: Finite number that multiplies the scores; K^-1/2 if None.
        initial_state: ``AttentionState(keys, values, lengths)`` before the first token; empty if None.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of N packed sequences in one row (B=1), ``[N+1]``, int32 or int64.
        use_qk_l2norm_in_kernel: Make q and k unit length first, ``x * rsqrt(sum(x^2) + 1e-6)``.
        form: ``"recurrent"`` (the definition, a token loop), ``"chunk"`` (parallel in time) or ``"auto"``.
        chunk_size: Tokens a chunk; changes nothing beyond rounding. Not used here.
        backend: ``None`` for the best present, or ``"torch"``.

    Returns:
        ``o`` of ``[B, T, Q, V]`` in v's dtype, and ``AttentionState(keys, values, lengths)`` after the last
        token (float32, or float64 for float64) or None.

    Raises:
        TypeError: If an input is no float tensor, or dtypes differ.
        ValueError: If a shape disagrees with q's, or an option is unknown or out of range.
        RuntimeError: If a named backend cannot serve.

    Example:
        >>> import torch
        >>> from innerloop import ops
        >>> q, k, v = torch.randn(3, 1, 100, 2, 8).unbind(0)
        >>> o, state = ops.softmax_attention(q, k, v, output_final_state=True)
        >>> o.shape, state.keys.shape, state.lengths
        (torch.Size([1, 100, 2, 8]), torch.Size([1, 100, 2, 8]), tensor([100]))
    """
    return call(
        RULE,
        q,
        k,
        v,
        {},
        (window,),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        form=form,
        chunk_size=chunk_size,
        backend=backend,
    )
