"""Mamba-2: an additive memory that fades by token, as a state space."""

from __future__ import annotations

from torch import Tensor

from innerloop import ops
from innerloop.nn.gates import Decay, GateProjection, Scalars
from innerloop.nn.layer import Layer, Turn
from innerloop.nn.norms import RMSNorm
from innerloop.nn.projections import Projection, heads, width_of_heads
from innerloop.nn.streams import Streams


class Mamba2(Layer):
    r"""A selective state space whose heads share their keys and queries.

    .. math::
        \Delta = \mathrm{softplus}(W_\Delta x + b), \qquad
        S \leftarrow e^{-e^A \Delta} S + B (\Delta u)^\top, \qquad
        y = W_o \, \mathrm{RMSNorm}((S^\top C + d u) \circ \mathrm{SiLU}(W_z x))

    with u, B and C (value, key and query) from one projection and one convolution with bias. Dao and Gu (2024),
    arXiv:2405.21060.

    Args:
        width: Of the model, D.
        heads: Value heads, G.
        groups: Key heads, which divide the value heads: 1 shares B and C among all.
        key_width: Of a state, K; D / heads if None (the paper's is 64 to 256).
        value_width: Of a head, V; ``expand * D / heads`` if None.
        expand: Inner width by the model's.
        taps: Of the convolution; 0 leaves it out.

    Raises:
        ValueError: If sizes do not divide.

    Example:
        >>> import torch
        >>> from innerloop import nn
        >>> y, state = nn.Mamba2(32, heads=4, key_width=16)(torch.randn(3, 10, 32))
        >>> y.shape, state.memory.shape
        (torch.Size([3, 10, 32]), torch.Size([3, 4, 16, 16]))
    """

    rule = "mamba2"

    def __init__(
        self,
        width: int,
        heads: int = 4,
        *,
        groups: int = 1,
        key_width: int | None = None,
        value_width: int | None = None,
        expand: int = 2,
        taps: int = 4,
    ) -> None:
        """Draw the weights."""
        super().__init__(width)
        K = width_of_heads(width, heads, key_width)
        V = width_of_heads(expand * width, heads, value_width)
        if groups < 1 or heads % groups:
            raise ValueError(f"groups must divide heads={heads}; got {groups}")
        self.heads, self.groups = heads, groups
        sizes = {"value": heads * V, "key": groups * K, "query": groups * K}
        self.streams = Streams(width, sizes, taps, joined=True, bias=True)
        self.a = GateProjection(width, heads)
        self.decay = Decay(heads, rates=(1.0, 16.0))
        self.skip = Scalars(heads, start=1.0)
        self.gate = Projection(width, heads * V)
        self.norm = RMSNorm(heads * V // groups, gate_first=True)
        self.output = Projection(heads * V, width)

    def mix(self, x: Tensor, turn: Turn) -> Tensor:
        """Run the paper's layer."""
        u, k, q = self.streams(x, turn)
        u, k, q = heads(u, self.heads), heads(k, self.groups), heads(q, self.groups)
        step, g = self.decay.step_and_decay(self.a(x))
        o = turn.read(ops.mamba2, q, k, (step[..., None] * u).to(u.dtype), g=g, scale=1.0)
        y = (o + self.skip()[:, None] * u).to(u.dtype).flatten(-2)
        return self.output(self.norm(heads(y, self.groups), heads(self.gate(x), self.groups)).flatten(-2))
