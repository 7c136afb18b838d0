"""The library's own Hope layer on associative recall, beside the documents' block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from innerloop.algebra.self_modifying import unit
from innerloop.experiments.blocks.recall import KEYS, PAIRS, VALUES, accuracy, fit
from innerloop.nn import Hope

STEPS = 700
"""Updates after which the layer is judged: as many as the documents' block takes, less than half of what it may."""
OPTIONS: dict[str, Any] = {"periods": ()}
"""The layer that stands beside the documents' block, which has no levels either."""


class HopeLayerBlock(nn.Module):
    """Embed, let the layer learn the list while it reads it, answer from what it reads at the last token."""

    def __init__(self, width: int = 48, *, keys: int = KEYS, remembers: bool = True, **options: Any) -> None:
        """Draw the weights; ``options`` are the layer's. Unless it ``remembers`` the query is answered as it is."""
        super().__init__()
        self.remembers, self.keys = remembers, keys
        self.embedding = nn.Embedding(keys + VALUES, width)
        self.hope = Hope(width, 1, rate_max=1.0, **options)
        self.feed_forward = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.head = nn.Linear(width, VALUES)

    def forward(self, sequence: Tensor) -> Tensor:
        """Return the logits of the answer to the last token of ``sequence`` ``[B, T]``."""
        x = self.embedding(sequence)
        y = self.hope(x)[0] if self.remembers else self._unwritten(x)
        return self.head(self.feed_forward(y[:, -1]))

    def _unwritten(self, x: Tensor) -> Tensor:
        """Return the layer's answer, were its memory the identity and never written."""
        convolution = self.hope.query_convolution
        assert convolution is not None
        x, _ = convolution(x, x.new_zeros(x.shape[0], convolution.taps - 1, x.shape[-1]), None)
        return self.hope.output(self.hope.norm(unit(self.hope.query(x))))


class Trained(NamedTuple):
    """A trained block and its loss before every step."""

    block: HopeLayerBlock
    losses: list[float]


_trained: dict[str, Trained] = {}


def train_layer(
    seed: int, steps: int, options: dict[str, Any], progress: Callable[[float], None], *, pairs: int = PAIRS
) -> Trained:
    """Train a block on the document's task, or on lists of other ``pairs``."""
    keys = options.get("keys", KEYS)
    return Trained(*fit(lambda: HopeLayerBlock(**options), seed, steps, progress, pairs=pairs, keys=keys, settle=True))


def layers(
    seeds: Sequence[int], steps: int = STEPS, *, memory: bool = True, progress: Callable[[float], None]
) -> dict[str, Trained]:
    """Train the layer on each seed in turn, or find what this process has trained; keys are as JSON will have them."""
    found = {}
    for done, seed in enumerate(seeds):

        def share(part: float, done: int) -> None:
            progress((done + part) / len(seeds))

        kind = f"{seed} {steps} {memory}"
        if kind not in _trained:
            _trained[kind] = train_layer(seed, steps, {**OPTIONS, "remembers": memory}, partial(share, done=done))
        share(1.0, done)
        found[str(seed)] = _trained[kind]
    return found


def answered(block: HopeLayerBlock, pairs: int) -> float:
    """Share of 512 held-out lists of ``pairs`` pairs that the block answers."""
    return accuracy(block, pairs, block.keys)
