"""The library's own Hope layer on associative recall, beside the documents' block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from innerloop.experiments.blocks.recall import BATCH, KEYS, PAIRS, RATE, VALUES, draw, held_out, one_thread
from innerloop.nn import Hope


class HopeLayerBlock(nn.Module):
    """Embed, let the layer learn the list while it reads it, answer from what it reads at the last token."""

    def __init__(self, width: int = 48, **options: Any) -> None:
        """Draw the weights; ``options`` are the layer's."""
        super().__init__()
        self.embedding = nn.Embedding(KEYS + VALUES, width)
        self.hope = Hope(width, 1, rate_max=1.0, **options)
        self.feed_forward = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.head = nn.Linear(width, VALUES)

    def forward(self, sequence: Tensor) -> Tensor:
        """Return the logits of the answer to the last token of ``sequence`` ``[B, T]``."""
        y, _ = self.hope(self.embedding(sequence))
        return self.head(self.feed_forward(y[:, -1]))


def train_layer(
    seed: int, steps: int, options: dict[str, Any], progress: Callable[[float], None]
) -> tuple[HopeLayerBlock, list[float]]:
    """Train a block on the document's task, and return it with its loss before every step."""
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(seed)
        block, generator = HopeLayerBlock(**options), torch.Generator().manual_seed(seed)
        optimizer, losses = torch.optim.Adam(block.parameters(), lr=RATE), []
        for step in range(steps):
            sequence, answer = draw(BATCH, PAIRS, generator)
            loss = F.cross_entropy(block(sequence), answer)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            progress((step + 1) / steps)
    return block, losses


@torch.no_grad()
def answered(block: HopeLayerBlock, pairs: int) -> float:
    """Share of 512 held-out lists of ``pairs`` pairs that the block answers."""
    sequence, answer = held_out(pairs)
    with one_thread():
        return (block(sequence).argmax(-1) == answer).float().mean().item()
