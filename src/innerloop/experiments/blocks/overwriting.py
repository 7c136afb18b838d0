"""The documents' trained overwrite recall: one matrix memory whose addresses come of the key alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from innerloop import ops
from innerloop.probe.trial import one_thread

KEYS, VALUES = 8, 16
TRAINING, HELD_OUT, BATCH, RATE = 4096, 1024, 256, 3e-3

Write = Literal["hebbian", "delta", "doubled"]
"""``doubled`` is the delta rule whose strength may reach 2."""


class Lists(NamedTuple):
    """Writes, then a question for every key."""

    keys: Tensor
    """``[B, T]``"""
    contents: Tensor
    """``[B, T]``, the token ``VALUES`` where a key is asked for."""
    answers: Tensor
    """The latest value of each key asked for, ``[B, KEYS]``."""


def draw(count: int, repeats: int, seed: int) -> Lists:
    """Draw lists by the document's own calls, so that its seed gives its lists."""
    rng = np.random.default_rng(seed)
    total = KEYS * repeats
    keys = np.zeros((count, total + KEYS), np.int64)
    contents = np.full((count, total + KEYS), VALUES, np.int64)
    answers = np.zeros((count, KEYS), np.int64)
    for row in range(count):
        what = rng.integers(0, VALUES, total)
        order = rng.permutation(total)
        k, v = np.tile(np.arange(KEYS), repeats)[order], what[order]
        latest = np.zeros(KEYS, np.int64)
        latest[k] = v  # NumPy keeps the last of several writes to one place.
        asked = rng.permutation(KEYS)
        keys[row], contents[row, :total], answers[row] = np.concatenate((k, asked)), v, latest[asked]
    return Lists(*map(torch.from_numpy, (keys, contents, answers)))


class MemoryModel(nn.Module):
    """One memory and a feed-forward block; modules stand in the document's order, so that a seed draws its weights."""

    def __init__(self, write: Write, width: int = 64, head: int = 48) -> None:
        """Draw the weights."""
        super().__init__()
        self.write = write
        self.key, self.content = nn.Embedding(KEYS, width), nn.Embedding(VALUES + 1, width)
        self.to_q, self.to_k = (nn.Linear(width, head, bias=False) for _ in range(2))
        self.strength = nn.Linear(width, 1)
        self.to_v, self.output = nn.Linear(width, head, bias=False), nn.Linear(head, width, bias=False)
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, VALUES)

    def forward(self, keys: Tensor, contents: Tensor) -> Tensor:
        """Return the logits of every question's answer, ``[B, KEYS, VALUES]``."""
        a, c = self.key(keys), self.content(contents)
        q, k = (F.normalize(to(a), dim=-1)[:, :, None] for to in (self.to_q, self.to_k))
        v = self.to_v(c)[:, :, None]
        if self.write == "hebbian":
            o, _ = ops.linear_attention(q, k, v, scale=1.0)
        else:
            strongest = 2.0 if self.write == "doubled" else 1.0
            o, _ = ops.delta_rule(q, k, v, beta=strongest * torch.sigmoid(self.strength(a)), scale=1.0)
        # Only questions are judged; what comes after the memory sees one token at a time.
        h = (a + c + self.output(o[:, :, 0]))[:, -KEYS:]
        h = h + self.feed_forward(self.first_norm(h))
        return self.head(self.second_norm(h))


def trained_recall(
    write: Write, repeats: int, epochs: int, seed: int = 0, progress: Callable[[float], None] = lambda fraction: None
) -> float:
    """Train a model as the document does and return its accuracy on lists held out."""
    training, held = draw(TRAINING, repeats, 1), draw(HELD_OUT, repeats, 2)
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(seed)
        model = MemoryModel(write)
        optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
        for epoch in range(epochs):
            for i in torch.randperm(TRAINING).split(BATCH):
                logits = model(training.keys[i], training.contents[i])
                loss = F.cross_entropy(logits.flatten(0, 1), training.answers[i].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            progress((epoch + 1) / epochs)
        with torch.no_grad():
            right = model(held.keys, held.contents).argmax(-1) == held.answers
    return right.float().mean().item()
