"""Softmax attention: every pair is kept."""

from __future__ import annotations

from torch import Tensor

from innerloop import ops
from innerloop.algebra.attention import recent
from innerloop.arguments import check_count
from innerloop.nn.layer import Layer, Turn
from innerloop.nn.norms import RMSNorm
from innerloop.nn.projections import Projection, heads, width_of_heads
from innerloop.nn.rotary import check_rotary, frequencies_of, rotate
from innerloop.nn.streams import Streams


class SoftmaxAttention(Layer):
    r"""Causal attention with rotary positions, and keys that may be shared by several query heads.

    .. math:: o_t = \sum_{s \le t} \mathrm{softmax}_s(R_t q_t \cdot R_s k_s / \sqrt{K}) \, v_s, \qquad y = W_o o

    Vaswani et al. (2017), arXiv:1706.03762; rotations Su et al. (2021), arXiv:2104.09864; shared keys Ainslie et al.
    (2023), arXiv:2305.13245. With a window, s runs from t - window + 1, and the state keeps the pairs that the next
    token still sees (Beltagy et al., 2020, arXiv:2004.05150).

    Args:
        width: Of the model, D.
        heads: Query heads.
        key_heads: Key and value heads, which divide the query heads; as many if None.
        key_width: Of a head, K; D / heads if None.
        value_width: Of a head, V; K if None.
        rotary_base: Of the rotations' frequencies; None leaves tokens without positions.
        key_norm: Whether q and k pass an RMSNorm in each head first.
        window: How many tokens a query looks back on, itself among them; 0 for all.

    Raises:
        ValueError: If sizes do not divide, K is odd under rotations, or the window is below 0.

    Example:
        >>> import torch
        >>> from innerloop import nn
        >>> layer = nn.SoftmaxAttention(32, heads=4, key_heads=2)
        >>> y, state = layer(torch.randn(3, 10, 32))
        >>> y.shape, state.memory.keys.shape, state.crop(4).memory.keys.shape
        (torch.Size([3, 10, 32]), torch.Size([3, 10, 2, 8]), torch.Size([3, 4, 2, 8]))
    """

    rule = "softmax_attention"

    def __init__(
        self,
        width: int,
        heads: int = 4,
        *,
        key_heads: int | None = None,
        key_width: int | None = None,
        value_width: int | None = None,
        rotary_base: float | None = 10_000.0,
        key_norm: bool = False,
        window: int = 0,
    ) -> None:
        """Draw the weights."""
        super().__init__(width)
        key_heads = heads if key_heads is None else key_heads
        if key_heads < 1 or heads % key_heads:
            raise ValueError(f"key_heads must divide heads={heads}; got {key_heads}")
        K = width_of_heads(width, heads, key_width)
        V = K if value_width is None else width_of_heads(width, heads, value_width)
        if rotary_base is not None:
            check_rotary(K)
        check_count("window", window, 0)
        self.window = window
        self.heads, self.key_heads, self.key_width, self.rotary_base = heads, key_heads, K, rotary_base
        sizes = {"query": heads * K, "key": key_heads * K, "value": key_heads * V}
        self.streams = Streams(width, sizes, 0, straight=sizes)
        self.query_norm = RMSNorm(K, eps=1e-6) if key_norm else None
        self.key_norm = RMSNorm(K, eps=1e-6) if key_norm else None
        self.output = Projection(heads * V, width)

    def mix(self, x: Tensor, turn: Turn) -> Tensor:
        """Run the paper's layer."""
        q, k, v = self.streams(x, turn)
        q, k, v = heads(q, self.heads), heads(k, self.key_heads), heads(v, self.key_heads)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.rotary_base is not None:
            positions, frequencies = turn.positions(), frequencies_of(self.key_width, self.rotary_base, x.device)
            q, k = rotate(q, positions, frequencies), rotate(k, positions, frequencies)
        o = turn.read(ops.softmax_attention, q, k, v, window=self.window)
        if self.window:
            turn.memory = ops.AttentionState(*recent(turn.memory, self.window - 1))
        return self.output(o.flatten(-2))
