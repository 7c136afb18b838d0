"""Gated linear attention: an additive memory whose channels fade apart."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from innerloop import ops
from innerloop.nn.gates import narrow_gates
from innerloop.nn.layer import Layer, Turn
from innerloop.nn.norms import RMSNorm
from innerloop.nn.projections import Projection, heads, value_heads_of, width_of_heads
from innerloop.nn.streams import Streams


class GatedLinearAttention(Layer):
    r"""Linear attention with a decay for every channel, through few channels.

    .. math::
        g = \tfrac{1}{\tau} \log \sigma(W^\uparrow_a W^\downarrow_a x + b), \qquad
        y = W_o (\mathrm{RMSNorm}(o) \circ \mathrm{SiLU}(W_z x))

    Yang et al. (2023), arXiv:2312.06635, with :math:`\tau = 16`. Keys are used as they are, and nothing is convolved.

    Args:
        width: Of the model, D.
        heads: Key heads, H.
        key_width: Of a head, K; D / H if None (the paper's is half of it).
        value_width: Of a head, V; K if None (the paper's is 2K).
        value_heads: G, a multiple of H; H if None.
        rank: Channels that the decay passes through.
        temperature: tau, at least 1 keeps more.

    Raises:
        ValueError: If sizes do not divide, or the temperature is not above 0.

    Example:
        >>> import torch
        >>> from innerloop import nn
        >>> y, state = nn.GatedLinearAttention(32, heads=2, key_width=8)(torch.randn(3, 10, 32))
        >>> y.shape, state.memory.shape
        (torch.Size([3, 10, 32]), torch.Size([3, 2, 8, 8]))
    """

    rule = "gla"

    def __init__(
        self,
        width: int,
        heads: int = 4,
        *,
        key_width: int | None = None,
        value_width: int | None = None,
        value_heads: int | None = None,
        rank: int = 16,
        temperature: float = 16.0,
    ) -> None:
        """Draw the weights."""
        super().__init__(width)
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0; got {temperature}")
        self.heads, self.value_heads, self.temperature = heads, value_heads_of(heads, value_heads), temperature
        K = width_of_heads(width, heads, key_width)
        V = K if value_width is None else width_of_heads(width, heads, value_width)
        G = self.value_heads
        sizes = {"query": heads * K, "key": heads * K, "value": G * V}
        self.streams = Streams(width, sizes, 0, straight=sizes)
        self.a = narrow_gates(width, rank, G * K, start=0.0)
        self.gate = Projection(width, G * V)
        self.norm = RMSNorm(V)
        self.output = Projection(G * V, width)

    def mix(self, x: Tensor, turn: Turn) -> Tensor:
        """Run the paper's layer."""
        q, k, v = self.streams(x, turn)
        q, k, v = heads(q, self.heads), heads(k, self.heads), heads(v, self.value_heads)
        g = F.logsigmoid(heads(self.a(x), self.value_heads)) / self.temperature
        o = turn.read(ops.gla, q, k, v, g=g)
        return self.output(self.norm(o, heads(self.gate(x), self.value_heads)).flatten(-2))
