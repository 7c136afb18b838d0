"""HOPE: memories that modify themselves, then a chain of networks that learn at different frequencies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from innerloop import ops
from innerloop.algebra.self_modifying import unit
from innerloop.arguments import check_choice, check_count, check_flags, check_positive
from innerloop.nn.cms import Levels
from innerloop.nn.convolution import ShortConvolution
from innerloop.nn.first_weights import FirstWeights
from innerloop.nn.gates import Scalars
from innerloop.nn.layer import Layer, Turn
from innerloop.nn.norms import RMSNorm
from innerloop.nn.projections import Projection, heads, width_of_heads


class Hope(Layer):
    r"""Five self-modifying memories behind short convolutions, then the continuum memory.

    .. math::
        k, v, \eta, \alpha = M_k(x'), M_v(x'), M_\eta(x'), M_\alpha(x'), \qquad
        o = M_{mem}(W_q x''), \qquad y = CMS(W_o \mathrm{RMSNorm}(o))

    Behrouz et al. (2025), arXiv:2512.24695, section 8, known here through secondary sources. From there: which memories
    there are and what they make, unit keys and queries, convolutions of width 4, the query as the one projection that
    stays, first weights that are learned. Ours: a convolution for x and one for q that are added to the tokens, heads,
    unit values, damped steps, linear memories and the read after the write by default (``memory="mlp"``,
    ``read="before"`` and mini-batches of 1 are nearest to the paper). What is kept begins at 1 - 1e-4 a token, for a
    memory that fades also loses its learned first weights. The outer gradient goes through every write unless
    ``stop_gradient_writes``.

    Args:
        width: Of the model, D.
        heads: H.
        memory: ``"linear"`` or ``"mlp"``, whose hidden layer is as wide as a head.
        read: ``"after"`` the write or ``"before"`` the mini-batch.
        mini_batch: Tokens between snapshots, of the memories that speak and of the one that is read; one number
            is both.
        rate_max: The largest rate; one over the larger mini-batch if None. At 1 memories grow without bound on a
            repeated or slowly drifting token, for gradients of a whole mini-batch are taken at one place.
        taps: Of the convolutions; 0 leaves them out.
        convolution: ``"added"`` to the tokens, or in their place behind ``"silu"``.
        normalize_v: Whether values are made unit length.
        normalize_step: Whether steps are damped.
        periods: Of the continuum memory, one number a level; None or () leaves it out.
        stop_gradient_writes: Take what is written as given: the outer gradient reaches queries, the read memory's first
            weights and what follows.

    Raises:
        ValueError: If sizes do not divide, or an option is unknown.

    Example:
        >>> import torch
        >>> from innerloop import nn
        >>> y, state = nn.Hope(32, heads=2)(torch.randn(3, 20, 32))
        >>> y.shape, len(state.memory.weights), state.memory.position
        (torch.Size([3, 20, 32]), 5, tensor([20, 20, 20]))
    """

    rule = "hope"

    def __init__(
        self,
        width: int,
        heads: int = 1,
        *,
        memory: Literal["linear", "mlp"] = "linear",
        read: Literal["after", "before"] = "after",
        mini_batch: tuple[int, int] | int = (16, 16),
        rate_max: float | None = None,
        taps: int = 4,
        convolution: Literal["added", "silu"] = "added",
        normalize_v: bool = True,
        normalize_step: bool = True,
        periods: Sequence[int] | int | None = (16, 64),
        stop_gradient_writes: bool = False,
    ) -> None:
        """Draw the weights."""
        super().__init__(width)
        check_choice("memory", memory, ("linear", "mlp"))
        check_choice("read", read, ("after", "before"))
        check_choice("convolution", convolution, ("added", "silu"))
        check_flags(
            normalize_v=normalize_v, normalize_step=normalize_step, stop_gradient_writes=stop_gradient_writes
        )
        if taps != 0:
            check_count("taps", taps)
        sizes = tuple(mini_batch) if isinstance(mini_batch, Sequence) else (mini_batch,) * 2
        if len(sizes) != 2:
            raise ValueError(f"mini_batch must be a whole number above 0, or two of them; got {mini_batch!r}")
        for size in sizes:
            check_count("mini_batch", size)
        K = width_of_heads(width, heads, None)
        self.heads, self.read, self.mini_batch = heads, read, sizes
        self.rate_max = 1 / max(sizes) if rate_max is None else rate_max
        check_positive("rate_max", self.rate_max)
        self.normalize_v, self.normalize_step = normalize_v, normalize_step
        self.stop_gradient_writes = stop_gradient_writes
        silu = convolution == "silu"
        self.token_convolution = ShortConvolution(width, taps, silu=silu) if taps else None
        self.query_convolution = ShortConvolution(width, taps, silu=silu) if taps else None
        self.query = Projection(width, width)

        def first(out: int, last: float = 1.0) -> FirstWeights:
            return FirstWeights(heads, (K, out) if memory == "linear" else (K, K, out), last=last)

        self.key, self.value = first(K), first(K)
        # Gates begin exactly at their biases, and a linear map that is read at its input: drawn weights would add a map
        # of the key to whatever is read at it. A deep one learns slower from output weights of 0.
        self.memory = first(K, last=0.0 if memory == "linear" else 1.0)
        self.rate, self.keep = first(1, last=0.0), first(1, last=0.0)
        self.rate_bias, self.keep_bias = Scalars(heads, start=0.0), Scalars(heads, start=9.0)
        self.norm = RMSNorm(K)
        self.output = Projection(width, width)
        self.levels = None if periods is None or periods == () else Levels(width, periods, 4 * width, True)

    def mix(self, x: Tensor, turn: Turn) -> Tensor:
        """Run the paper's layer."""
        token = x if self.token_convolution is None else turn.convolve("token", self.token_convolution, x)
        query = x if self.query_convolution is None else turn.convolve("query", self.query_convolution, x)
        q = unit(heads(self.query(query), self.heads))
        token = heads(token, self.heads).to(q.dtype)
        writers = self.key(), self.value(), self.rate(), self.keep()
        rate_bias, keep_bias = self.rate_bias(), self.keep_bias()
        if self.stop_gradient_writes:
            token, rate_bias, keep_bias = token.detach(), rate_bias.detach(), keep_bias.detach()
            writers = tuple(tuple(w.detach() for w in memory) for memory in writers)
        key, value, rate, keep = writers
        weights = ops.HopeWeights(key, value, rate, keep, self.memory(), rate_bias, keep_bias)
        o = turn.learn(
            ops.hope, token, q, weights=weights, rate_max=self.rate_max, read=self.read, mini_batch=self.mini_batch,
            normalize_step=self.normalize_step, normalize_v=self.normalize_v,
        )  # fmt: skip
        y = self.output(self.norm(o).flatten(-2))
        return y if self.levels is None else self.levels(y, x, turn, "levels")
