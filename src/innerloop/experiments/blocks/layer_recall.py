"""Any layer of the library on associative recall: embed, learn the list while it is read, answer at the last token."""

from __future__ import annotations

from torch import Tensor, nn

from innerloop.nn import Layer


class LayerRecall(nn.Module):
    """A layer between an embedding and a small feed-forward block."""

    def __init__(self, tokens: int, answers: int, layer: Layer) -> None:
        """Draw the weights of what is around the layer."""
        super().__init__()
        width = layer.width
        self.embedding = nn.Embedding(tokens, width)
        self.layer = layer
        self.feed_forward = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.head = nn.Linear(width, answers)

    def forward(self, sequence: Tensor) -> Tensor:
        """Return the logits of the answer to the last token of ``sequence`` ``[B, T]``."""
        y, _ = self.layer(self.embedding(sequence))
        return self.head(self.feed_forward(y[:, -1]))
