"""How well a model predicts a text: perplexity, bits a byte, bits a character."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from innerloop.data import Tokenizer
from innerloop.lm import LanguageModel, State


@dataclass(frozen=True)
class Score:
    """The cross entropy of a text, and what it was summed over."""

    nats: float
    """Summed over the tokens that were predicted: all but the first of each document."""
    tokens: int
    bytes: int
    """Of those tokens."""
    characters: int
    """That begin in those tokens."""

    def __add__(self, other: Score) -> Score:
        """Join two texts."""
        return Score(
            self.nats + other.nats,
            self.tokens + other.tokens,
            self.bytes + other.bytes,
            self.characters + other.characters,
        )

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """The exponential of ``loss``."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits that the text takes, divided by its bytes: independent of the tokenizer."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan

    @property
    def bits_per_character(self) -> float:
        """Bits that the text takes, divided by its characters: independent of the tokenizer."""
        return self.nats / math.log(2) / self.characters if self.characters else math.nan


NOTHING = Score(0.0, 0, 0, 0)


@torch.no_grad()
def evaluate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    documents: Iterable[Iterable[Tensor]],
    *,
    piece: int = 1024,
    window: int | None = None,
    progress: Callable[[Score], None] = lambda score: None,
) -> Score:
    """Predict every token of every document but its first, with a state carried from its beginning.

    Args:
        model: The model; it runs as in evaluation.
        tokenizer: What its tokens mean.
        documents: Of each, the ids in pieces of any length, int64 ``[T]``.
        piece: Tokens at once, at least 1; it changes the result by rounding alone.
        window: Tokens after which the state is forgotten; never if None. Attention without a window of its own takes
            time and memory with every token, and has not learned of places beyond its training's.
        progress: Called with the score so far.

    Returns:
        The score.
    """
    was, score = model.training, NOTHING
    model.eval()
    try:
        for document in documents:
            state: State | None = None
            for part, fresh in _stretches(document, piece, window):
                given = None if fresh else state
                loss, state = model.loss(part[None, :-1], part[None, 1:], given, reduction="sum")
                score += scored(loss.item(), part[1:], tokenizer)
                progress(score)
    finally:
        model.train(was)
    return score


@torch.no_grad()
def windows_score(model: LanguageModel, tokenizer: Tokenizer, windows: Tensor, rows: int = 32) -> Score:
    """Predict windows ``[N, length + 1]`` that know nothing of each other, ``rows`` at once."""
    was, score = model.training, NOTHING
    model.eval()
    try:
        for part in windows.split(rows):
            loss, _ = model.loss(part[:, :-1], part[:, 1:], reduction="sum")
            score += scored(loss.item(), part[:, 1:].flatten(), tokenizer)
    finally:
        model.train(was)
    return score


def scored(nats: float, ids: Tensor, tokenizer: Tokenizer) -> Score:
    """Return the score of tokens whose cross entropies sum up to ``nats``."""
    found = ids.numpy()
    return Score(
        nats, len(found), int(tokenizer.byte_counts[found].sum()), int(tokenizer.character_counts[found].sum())
    )


def _stretches(document: Iterable[Tensor], piece: int, window: int | None) -> Iterator[tuple[Tensor, bool]]:
    """Yield stretches of at most ``piece`` targets that share their ends, and whether a new window begins there."""
    held, seen = torch.empty(0, dtype=torch.int64), 0
    for ids in itertools.chain(document, (None,)):
        if ids is not None:
            held = torch.cat((held, ids))
        while True:
            wanted = piece if window is None else min(piece, window - seen % window)
            if len(held) <= (1 if ids is None else wanted):
                break
            part = held[: wanted + 1]
            yield part, window is not None and seen % window == 0
            seen += len(part) - 1
            held = held[len(part) - 1 :]
