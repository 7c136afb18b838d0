"""One block of a model: a memory and a feed-forward, each behind a norm and beside the stream."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from innerloop.lm.config import Config
from innerloop.lm.pattern import Entry
from innerloop.nn import RWKV7, Layer, LayerState
from innerloop.nn.dropout import Dropout
from innerloop.nn.norms import RMSNorm
from innerloop.nn.projections import Projection


class FeedForward(nn.Module):
    r"""The gated feed-forward :math:`W_o (\mathrm{SiLU}(W_g x) \circ W_u x)` of Shazeer (2020), arXiv:2002.05202."""

    def __init__(self, width: int, inner: int) -> None:
        """Draw the weights."""
        super().__init__()
        self.gate, self.up = Projection(width, inner), Projection(width, inner)
        self.down = Projection(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., D]`` to the same shape."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A layer and a feed-forward, each on the normed stream and added to it."""

    def __init__(self, config: Config, entry: Entry, index: int, layers: int) -> None:
        """Draw the weights; the layer is the ``index``-th of so many of its kind."""
        super().__init__()
        self.layer_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.layer: Layer = config.make_layer(entry, index, layers)
        inner = config.inner_width
        self.feed_forward_norm = RMSNorm(config.width, eps=config.norm_eps) if inner else None
        self.feed_forward = FeedForward(config.width, inner) if inner else None
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        state: LayerState | None,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        first_value: Tensor | None,
    ) -> tuple[Tensor, LayerState, Tensor | None]:
        """Map ``[B, T, D]``; also return the state, and the values that RWKV-7's later layers take from its first."""
        options = {"attention_mask": attention_mask, "cu_seqlens": cu_seqlens}
        h = self.layer_norm(x)
        if isinstance(self.layer, RWKV7):
            given = first_value if self.layer.index else None
            y, state, first_value = self.layer(h, state, first_value=given, output_first_value=True, **options)
        else:
            y, state = self.layer(h, state, **options)
        x = x + (self.dropout(y) if self.training else y)
        if self.feed_forward is not None and self.feed_forward_norm is not None:
            y = self.feed_forward(self.feed_forward_norm(x))
            x = x + (self.dropout(y) if self.training else y)
        assert state is not None
        return x, state, first_value
