"""Linear attention: the mean of all values, weighted by products of features."""

from __future__ import annotations

import torch
from torch import Tensor

from innerloop import ops
from innerloop.nn.layer import Layer, Turn
from innerloop.nn.projections import Projection, heads, value_heads_of, width_of_heads
from innerloop.nn.streams import Streams


class LinearAttention(Layer):
    r"""Attention whose kernel is an inner product of features.

    .. math:: o_t = \frac{\sum_{s \le t} \phi(q_t)^\top \phi(k_s) v_s}{\sum_{s \le t} \phi(q_t)^\top \phi(k_s)}, \qquad
        \phi(x) = \mathrm{elu}(x) + 1, \qquad y = W_o o

    Katharopoulos et al. (2020), arXiv:2006.16236.

    Args:
        width: Of the model, D.
        heads: Key heads, H.
        key_width: Of a head, K; D / H if None.
        value_width: Of a head, V; K if None.
        value_heads: G, a multiple of H; H if None.

    Raises:
        ValueError: If sizes do not divide.

    Example:
        >>> import torch
        >>> from innerloop import nn
        >>> y, state = nn.LinearAttention(32, heads=2)(torch.randn(3, 10, 32))
        >>> y.shape, state.memory.S.shape
        (torch.Size([3, 10, 32]), torch.Size([3, 2, 16, 16]))
    """

    rule = "normalized_linear_attention"

    def __init__(
        self,
        width: int,
        heads: int = 4,
        *,
        key_width: int | None = None,
        value_width: int | None = None,
        value_heads: int | None = None,
    ) -> None:
        """Draw the weights."""
        super().__init__(width)
        self.heads, self.value_heads = heads, value_heads_of(heads, value_heads)
        K = width_of_heads(width, heads, key_width)
        V = K if value_width is None else width_of_heads(width, heads, value_width)
        sizes = {"query": heads * K, "key": heads * K, "value": self.value_heads * V}
        self.streams = Streams(width, sizes, 0, straight=sizes)
        self.output = Projection(self.value_heads * V, width)

    def mix(self, x: Tensor, turn: Turn) -> Tensor:
        """Run the paper's layer."""
        q, k, v = self.streams(x, turn)
        q, k = features(heads(q, self.heads)), features(heads(k, self.heads))
        o = turn.read(ops.normalized_linear_attention, q, k, heads(v, self.value_heads))
        return self.output(o.flatten(-2))


def features(x: Tensor) -> Tensor:
    """Return elu(x) + 1, without the sum that rounds it to 0 far below 0 (in bfloat16 from -6 on)."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
