"""Associative recall: a list of keys and values, then one of the keys; the answer is its value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from innerloop.experiments.blocks.hope import HopeBlock
from innerloop.probe.trial import one_thread

KEYS, VALUES = 8, 12
CHANCE = 1 / VALUES
PAIRS, BATCH, RATE = 4, 64, 3e-3


def draw(batch: int, pairs: int, generator: torch.Generator, keys: int = KEYS) -> tuple[Tensor, Tensor]:
    """Draw sequences ``[batch, 2 * pairs + 1]`` and the values they ask for, by the document's own calls."""
    # One sequence at a time and in this order: only then are the numbers the document's.
    sequences, answers = [], []
    for _ in range(batch):
        chosen = torch.randperm(keys, generator=generator)[:pairs].tolist()
        values = torch.randint(0, VALUES, (pairs,), generator=generator).tolist()
        asked = int(torch.randint(0, pairs, (1,), generator=generator))
        listed = [token for key, value in zip(chosen, values, strict=True) for token in (key, keys + value)]
        sequences.append([*listed, chosen[asked]])
        answers.append(values[asked])
    return torch.tensor(sequences), torch.tensor(answers)


def held_out(pairs: int, keys: int = KEYS) -> tuple[Tensor, Tensor]:
    """Return the document's 512 lists of ``pairs`` pairs that no training draws on purpose, and their answers."""
    return draw(512, pairs, torch.Generator().manual_seed(999), keys)


def spell(token: int) -> str:
    """Return ``k3`` for a key and ``v7`` for a value."""
    return f"k{token}" if token < KEYS else f"v{token - KEYS}"


class Trained(NamedTuple):
    """A trained block and its loss at every step, before the step."""

    block: HopeBlock
    losses: list[float]


_trained: dict[tuple[int, int, bool, bool], Trained] = {}


def no_report(fraction: float) -> None:
    """Leave progress unreported."""


def train(
    seed: int, steps: int, *, memory: bool = True, settle: bool = False,
    progress: Callable[[float], None] = no_report,
) -> Trained:  # fmt: skip
    """Train a block as the document does; the same call returns the same block again in this process."""
    kind = (seed, steps, memory, settle)
    if kind not in _trained:
        _trained[kind] = _train(*kind, progress)
    progress(1.0)
    return _trained[kind]


def train_each(
    seeds: Sequence[int], steps: int, *, memory: bool = True, settle: bool = False, progress: Callable[[float], None]
) -> dict[str, Trained]:
    """Train on each seed in turn; the keys are the seeds as JSON will have them."""

    def share(part: float, done: int) -> None:
        progress((done + part) / len(seeds))

    return {
        str(seed): train(seed, steps, memory=memory, settle=settle, progress=partial(share, done=done))
        for done, seed in enumerate(seeds)
    }


def _train(seed: int, steps: int, memory: bool, settle: bool, progress: Callable[[float], None]) -> Trained:
    return Trained(*fit(lambda: HopeBlock(KEYS + VALUES, VALUES, memory=memory), seed, steps, progress, settle=settle))


Block = TypeVar("Block", bound=nn.Module)


def fit(
    make: Callable[[], Block], seed: int, steps: int, progress: Callable[[float], None], *, pairs: int = PAIRS,
    keys: int = KEYS, settle: bool = False,
) -> tuple[Block, list[float]]:  # fmt: skip
    """Make a block and train it on fresh lists of so many ``pairs``; return it, and its loss before every step."""
    # At the document's constant rate Adam, whose gradients are almost 0 by then, throws the weights about to the end:
    # how well a block does hangs on where the last throw left it. To settle, the rate falls to 0 over the second half.
    # The document seeds the global generator before it builds the block; its data have a generator of their own.
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(seed)
        block = make()
        generator = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.Adam(block.parameters(), lr=RATE, fused=True)
        losses = []
        for step in range(steps):
            if settle:
                optimizer.param_groups[0]["lr"] = RATE * min(1.0, 2 * (steps - step) / steps)
            sequence, answer = draw(BATCH, pairs, generator, keys)
            loss = F.cross_entropy(block(sequence), answer)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            progress((step + 1) / steps)
    return block, losses


@torch.no_grad()
def accuracy(block: Callable[[Tensor], Tensor], pairs: int, keys: int = KEYS) -> float:
    """Share of 512 held-out lists of ``pairs`` pairs that ``block`` answers, the same lists as the document's."""
    sequence, answer = held_out(pairs, keys)
    with one_thread():
        return (block(sequence).argmax(-1) == answer).float().mean().item()


@torch.no_grad()
def chances(block: HopeBlock, sequence: Tensor) -> Tensor:
    """Return how likely each value is to be answered, had each key been asked after each token, ``[T, keys, values]``.

    Asking after token t means running the block on the first t tokens and the key: it writes the key, then reads.
    """
    keys = torch.arange(KEYS)[:, None]
    asked = (torch.cat((sequence[: t + 1].expand(KEYS, -1), keys), 1) for t in range(len(sequence)))
    with one_thread():
        return torch.stack([block(sequences).softmax(-1) for sequences in asked])
