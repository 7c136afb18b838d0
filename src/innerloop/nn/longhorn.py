"""Longhorn: every pair is written by the exact solution of a problem of its own."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as F

from innerloop import ops
from innerloop.nn.gates import GateProjection, Scalars, narrow_gates
from innerloop.nn.layer import Layer, Turn
from innerloop.nn.projections import Projection, heads, width_of_heads
from innerloop.nn.streams import Streams


class Longhorn(Layer):
    r"""The implicit step in Mamba's block: what is convolved is the value, and makes key, query and strength.

    .. math::
        u = \mathrm{SiLU}(\mathrm{conv}(W_u x)), \qquad k, q = W_k u, W_q u, \qquad \beta = \sigma(W_\beta u + b),
        \qquad y = W_o ((o + d \circ u) \circ \mathrm{SiLU}(W_z x))

    Liu et al. (2024), arXiv:2407.14207. Keys are used as they are. ``diagonal=True`` is the published layer: one head,
    a strength for every channel of the value (through D / 16 channels), and the diagonal of the step. Without,
    each head takes the whole step, of one strength.

    Args:
        width: Of the model, D.
        heads: Of the memory, each with keys of its own; 1 where the step is diagonal.
        key_width: Of a key, K.
        expand: Width of the value by the model's.
        taps: Of the convolution, which has a bias; 0 leaves it out.
        diagonal: See above.

    Raises:
        ValueError: If sizes do not divide, or the diagonal step is asked of several heads.

    Example:
        >>> import torch
        >>> from innerloop import nn
        >>> y, state = nn.Longhorn(32, diagonal=True)(torch.randn(3, 10, 32))
        >>> y.shape, state.memory.shape
        (torch.Size([3, 10, 32]), torch.Size([3, 1, 16, 64]))
    """

    def __init__(
        self,
        width: int,
        heads: int | None = None,
        *,
        key_width: int = 16,
        expand: int = 2,
        taps: int = 4,
        diagonal: bool = False,
    ) -> None:
        """Draw the weights."""
        super().__init__(width)
        self.heads = (1 if diagonal else 4) if heads is None else heads
        if diagonal and self.heads != 1:
            raise ValueError(f"the diagonal step has heads=1, a strength for every channel; got {heads}")
        self.diagonal, self.rule = diagonal, "longhorn_diagonal" if diagonal else "longhorn"
        inner = expand * width
        width_of_heads(inner, self.heads, None)
        self.streams = Streams(width, {"value": inner}, taps, bias=True)
        self.key, self.query = (Projection(inner, self.heads * key_width) for _ in range(2))
        rank = math.ceil(width / 16)
        self.b = (
            narrow_gates(inner, rank, inner, start=0.0) if diagonal else GateProjection(inner, self.heads, start=0.0)
        )
        self.skip = Scalars(inner, start=1.0)
        self.gate = Projection(width, inner)
        self.output = Projection(inner, width)

    def mix(self, x: Tensor, turn: Turn) -> Tensor:
        """Run the paper's layer."""
        (u,) = self.streams(x, turn)
        k, q, v, beta = (
            heads(self.key(u), self.heads),
            heads(self.query(u), self.heads),
            heads(u, self.heads),
            self.b(u),
        )
        if self.diagonal:
            o = turn.read(ops.longhorn_diagonal, q, k, v, beta=beta.sigmoid()[..., None, :], scale=1.0)
        else:
            o = turn.read(ops.longhorn, q, k, v, beta=beta.sigmoid(), scale=1.0)
        y = (o.flatten(-2) + self.skip() * u).to(u.dtype)
        return self.output(y * F.silu(self.gate(x)))
