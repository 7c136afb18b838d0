"""Linear attention whose weights sum to one."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from innerloop.checks import Backend, Form
from innerloop.dispatch import call
from innerloop.kernels.families import ADDITIVE
from innerloop.kernels.operator import Options
from innerloop.recipe import Exact, KernelSmoother, QueryKernel, Recipe, dot
from innerloop.rule import Rule
from innerloop.shapes import compute_dtype


class NormalizedState(NamedTuple):
    """The sum of the pairs, and the sum of the keys."""

    S: Tensor
    """``[N, G, K, V]``"""
    z: Tensor
    """``[N, G, K]``"""


class NormalizedLinearAttention(Rule):
    r"""A kernel smoother whose kernel is the product of query and key.

    .. math:: o_t = \frac{S_t^\top q_t}{q_t^\top z_t}, \qquad S_t = S_{t-1} + k_t v_t^\top, \quad z_t = z_{t-1} + k_t

    Katharopoulos et al. (2020), arXiv:2006.16236.
    """

    name = "normalized_linear_attention"
    paper = "Katharopoulos et al. (2020), arXiv:2006.16236"
    recipe = Recipe(QueryKernel(dot), KernelSmoother(), Exact())
    states: ClassVar = {"S": ("G", "K", "V"), "z": ("G", "K")}
    state_type = NormalizedState
    nonnegative = True

    def step(self, q: Tensor, k: Tensor, v: Tensor, *, state: NormalizedState) -> tuple[Tensor, NormalizedState]:
        """Add the pair and the key, read their quotient."""
        memory = state.S + k[..., :, None] * v[..., None, :]  # [B, G, K, V]
        total = state.z + k  # [B, G, K]
        read = torch.einsum("bgkv,bgk->bgv", memory, q)
        return quotient(read, (q * total).sum(-1, keepdim=True)), NormalizedState(memory, total)

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, *, state: NormalizedState | None, options: Options
    ) -> tuple[Tensor, NormalizedState]:
        """Run the additive family on values with a column of ones, whose read is the denominator."""
        wide = v.to(compute_dtype(v.dtype))
        ones = torch.cat((wide, torch.ones_like(wide[..., :1])), -1)  # [B, T, G, V + 1]
        both = None if state is None else torch.cat((state.S, state.z[..., None]), -1)
        read, after = ADDITIVE(q, k, ones, (None,), (both,), options)
        out = quotient(read[..., :-1], read[..., -1:]).to(v.dtype)
        return out, NormalizedState(after[..., :-1].contiguous(), after[..., -1].contiguous())


def quotient(read: Tensor, weight: Tensor) -> Tensor:
    """Return ``read / weight``, and 0 with a finite gradient where the weight is 0."""
    empty = weight == 0
    return (read / weight.masked_fill(empty, 1)).masked_fill(empty, 0)


RULE = NormalizedLinearAttention()


def normalized_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    initial_state: NormalizedState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    form: Form = "auto",
    chunk_size: int | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, NormalizedState | None]:
    r"""Read the mean of all values, weighted by the product of the query with their keys.

    .. math:: o_t = \frac{S_t^\top q_t}{q_t^\top z_t}, \qquad S_t = S_{t-1} + k_t v_t^\top, \quad z_t = z_{t-1} + k_t

    Katharopoulos et al. (2020), arXiv:2006.16236. Meant for non-negative q and k: the feature map is the layer's.

    Args:
        q: Queries, ``[B, T, H, K]``.
        k: Keys, ``[B, T, H, K]``, used as given.
        v: Values, ``[B, T, G, V]`` with G a multiple of H; value head h reads key head ``h // (G // H)``.
        scale: Any finite number; it cancels.
        initial_state: ``NormalizedState(S, z)`` before the first token, ``[N, G, K, V]`` and ``[N, G, K]``; zeros
            if None.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of N packed sequences in one row (B=1), ``[N+1]``, int32 or int64.
        use_qk_l2norm_in_kernel: Make q and k unit length first, ``x * rsqrt(sum(x^2) + 1e-6)``.
        form: ``"recurrent"`` (the definition, a token loop), ``"chunk"`` (parallel in time) or ``"auto"``.
        chunk_size: Tokens a chunk; changes nothing beyond rounding. 64 if None.
        backend: ``None`` for the best present, or ``"torch"``.

    Returns:
        ``o`` of ``[B, T, G, V]`` in v's dtype (0 where the weights sum to 0), and ``NormalizedState(S, z)``
        after the last token (float32, or float64 for float64) or None.

    Raises:
        TypeError: If an input is no float tensor, or dtypes differ.
        ValueError: If a shape disagrees with q's, or an option is unknown.
        RuntimeError: If a named backend cannot serve.

    Example:
        >>> import torch
        >>> from innerloop import ops
        >>> q, k, v = torch.randn(3, 1, 100, 2, 8).unbind(0)
        >>> o, _ = ops.normalized_linear_attention(q.exp(), k.exp(), v)
        >>> bool((o.amax() <= v.amax()) & (o.amin() >= v.amin()))  # a mean of values
        True
    """
    return call(
        RULE,
        q,
        k,
        v,
        {},
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
