"""DeltaProduct: several delta steps a token."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from innerloop.checks import Backend, Form
from innerloop.dispatch import call
from innerloop.kernels.families import DELTA
from innerloop.kernels.operator import Options
from innerloop.rule import Gate, Rule


class DeltaProduct(Rule):
    r"""A few gradient steps a token, each on a pair of its own, on a map that may fade first.

    .. math::
        S_t = e^{g_t} \Big( \prod_{i=n}^{1} (I - \beta_{t,i} k_{t,i} k_{t,i}^\top) \Big) S_{t-1}
            + \sum_{i=1}^{n} \Big( \prod_{j=n}^{i+1} (I - \beta_{t,j} k_{t,j} k_{t,j}^\top) \Big)
                \beta_{t,i} k_{t,i} v_{t,i}^\top

    Siems et al. (2025), arXiv:2502.10297.
    """

    name = "delta_product"
    paper = "Siems et al. (2025), arXiv:2502.10297"
    departs = "a token takes n gradient steps, each on the loss of another pair, and is read once after the last"
    gates = (
        Gate("g", low=-math.inf, high=0.0, enforced=True, optional=True),
        Gate("beta", low=0.0, high=2.0, axes=("B", "T", "n", "G")),
    )
    axes: ClassVar = {
        "q": ("B", "T", "H", "K"),
        "k": ("B", "T", "n", "H", "K"),
        "v": ("B", "T", "n", "G", "V"),
    }
    family = DELTA

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor | None, beta: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Fade, correct the memory at one key after another, read."""
        if g is not None:
            state = g.exp()[..., None, None] * state  # [B, G, K, V]
        for key, value, rate in zip(k.unbind(1), v.unbind(1), beta.unbind(1), strict=True):
            error = value - torch.einsum("bgkv,bgk->bgv", state, key)  # [B, G, V]
            state = state + key[..., :, None] * (rate[..., None] * error)[..., None, :]
        return torch.einsum("bgkv,bgk->bgv", state, q), state

    def chunk(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        g: Tensor | None,
        beta: Tensor,
        state: Tensor | None,
        options: Options,
    ) -> tuple[Tensor, Tensor]:
        """Run the delta family over all n T steps, and keep what is read after the last step of every token."""
        # The other steps read at a zero query. A family with fewer queries than keys would save that, three of seven
        # products; this way there is none, and a native kernel of the delta family serves here too.
        steps = k.shape[2]
        q = torch.cat((_idle(q, steps), q[:, :, None]), 2).flatten(1, 2)  # [B, nT, H, K]
        if g is not None:
            g = torch.cat((g[:, :, None], _idle(g, steps)), 2).flatten(1, 2)
        k, v, beta = (x.flatten(1, 2) for x in (k, v, beta))
        if options.cu_seqlens is not None:
            options = options._replace(cu_seqlens=options.cu_seqlens * steps)
        out, after = DELTA(q, k, v, (g, beta), (state,), options)
        return out.unflatten(1, (-1, steps))[:, :, -1].contiguous(), after


def _idle(x: Tensor, steps: int) -> Tensor:
    """Return zeros for all but one of a token's steps."""
    return x.new_zeros((*x.shape[:2], steps - 1, *x.shape[2:]))


RULE = DeltaProduct()


def delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor,
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
    r"""Write n pairs a token, each by one gradient step, on a memory that may fade first; read after the last.

    .. math::
        S_{t,0} = e^{g_t} S_{t-1,n}, \qquad
        S_{t,i} = S_{t,i-1} + \beta_{t,i} k_{t,i} (v_{t,i} - S_{t,i-1}^\top k_{t,i})^\top, \qquad
        o_t = \mathrm{scale} \cdot S_{t,n}^\top q_t

    Siems et al. (2025), arXiv:2502.10297.

    Args:
        q: Queries, ``[B, T, H, K]``.
        k: Keys, ``[B, T, n, H, K]`` with n at least 1 steps a token, used as given.
        v: Values, ``[B, T, n, G, V]`` with G a multiple of H; value head h reads key head ``h // (G // H)``.
        beta: Write strength of each step, ``[B, T, n, G]``; with unit keys 0 keeps, 1 replaces, 2 reflects.
        g: Natural log of the decay before a token's first step, ``[B, T, G]``, at most 0; ``-inf`` clears the memory;
            no decay if None.
        scale: Finite number that multiplies the read; K^-1/2 if None.
        initial_state: Memory before the first token, ``[N, G, K, V]``; zeros if None.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens: Bounds of N packed sequences in one row (B=1), in tokens, ``[N+1]``, int32 or int64.
        use_qk_l2norm_in_kernel: Make q and k unit length first, ``x * rsqrt(sum(x^2) + 1e-6)``.
        form: ``"recurrent"`` (the definition, a token loop), ``"chunk"`` (parallel in time) or ``"auto"``.
        chunk_size: Steps a chunk, n of them a token; changes nothing beyond rounding. 64 if None.
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
        >>> q = torch.randn(1, 100, 2, 8)
        >>> k, v = torch.randn(2, 1, 100, 3, 2, 8).unbind(0)  # three steps a token
        >>> o, state = ops.delta_product(
        ...     q, k, v, beta=2 * torch.rand(1, 100, 3, 2), use_qk_l2norm_in_kernel=True, output_final_state=True
        ... )
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 8]), torch.Size([1, 2, 8, 8]))
    """
    return call(
        RULE,
        q,
        k,
        v,
        {"g": g, "beta": beta},
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
