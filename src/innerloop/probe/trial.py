"""One layer trained on one task from one seed, and judged."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from innerloop.checks import check_field, check_least
from innerloop.data.tasks import Batch, Task
from innerloop.probe.contender import Contender
from innerloop.probe.model import ProbeModel
from innerloop.threads import threads

_JUDGED = 1_000_003  # the seed of what is judged on, apart from every training's
_PIECE = 16_384
"""Tokens judged at once, so that long sequences fit into memory."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What every layer gets.

    Raises:
        TypeError: If a number is none, or not whole where it must be.
        ValueError: If it is out of range.
    """

    steps: int = 1000
    """Updates at most."""
    batch: int = 64
    """Sequences an update, drawn anew."""
    rate: float = 3e-3
    """Of Adam; it rises over the first twentieth of the updates and falls to a tenth as a cosine."""
    clip: float = 1.0
    """Norm that gradients are cut to."""
    enough: float = 0.999
    """Training ends once the last 20 batches have this score on average; above 1, never."""
    width: int = 64
    heads: int = 2
    depth: int = 1
    """How often the layer is repeated."""
    feed_forward: int = 2
    """Inner width of the feed-forwards as a multiple of the width; 0 leaves them out."""
    judged: int = 512
    """Sequences that a layer is judged on, the same for all."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        for field in fields(self):
            check_field(field.name, field.type, getattr(self, field.name))
        for name, low in (("steps", 0), ("batch", 1), ("width", 1), ("heads", 1), ("depth", 1), ("feed_forward", 0),
                          ("judged", 1)):  # fmt: skip
            check_least(name, getattr(self, name), low)
        for name in ("rate", "clip", "enough"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0 and finite; got {value!r}")

    def rate_at(self, step: int) -> float:
        """Return the rate of the update that follows ``step`` others."""
        warm = max(1, self.steps // 20)
        if step < warm:
            return self.rate * (step + 1) / warm
        part = (step - warm) / max(1, self.steps - warm)
        return self.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * part)))


class Training(NamedTuple):
    """How a training went."""

    losses: list[float]
    """Of every update, before it."""
    stage: int
    """The stage that it ended in, the first 0."""


@dataclass(frozen=True)
class Judgement:
    """What a model scores on sequences of one length."""

    score: float
    """Mean over all answers asked for."""
    last: float
    """Mean over the last answer of each sequence."""


@dataclass(frozen=True)
class Row:
    """One layer, trained from one seed."""

    layer: str
    seed: int
    scores: dict[str, float]
    """By factor of the training's length, ``"1"`` first: the mean over all answers."""
    last: dict[str, float]
    """The same of the last answer of each sequence."""
    parameters: int
    state_bytes: int | None
    """Of one sequence after the training's length; None if the layer hands out no state."""
    steps: int
    """Updates until it had learned enough, or all."""
    seconds: float
    losses: list[float]


def train(
    model: nn.Module,
    stages: Sequence[Task],
    budget: Budget,
    generator: torch.Generator,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Training:
    """Train a model on a task, or on stages of it, each begun once the one before is mastered at its last answer.

    Args:
        model: From inputs to answers, as the task says.
        stages: Tasks, the last of which is the one meant.
        budget: Of all stages together.
        generator: Of the sequences.
        progress: Called with the fraction of the steps done.

    Returns:
        Losses and the stage reached.

    Raises:
        FloatingPointError: If a loss is not finite.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=budget.rate)
    losses, stage, lately = [], 0, deque[float](maxlen=20)
    for step in range(budget.steps):
        for group in optimizer.param_groups:
            group["lr"] = budget.rate_at(step)
        batch = stages[stage].draw(budget.batch, generator)
        answers = model(batch.inputs)
        loss = loss_of(answers, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), budget.clip)
        optimizer.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(f"the loss is {losses[-1]} at update {step + 1}")
        progress((step + 1) / budget.steps)
        with torch.no_grad():
            judged = judgement(stages[stage], answers, batch.labels)
        lately.append(judged.last if stage < len(stages) - 1 else judged.score)
        if stage < len(stages) - 1:
            if len(lately) >= 5 and sum(list(lately)[-5:]) / 5 >= 0.99:
                stage += 1
                lately.clear()
        elif len(lately) == 20 and sum(lately) / 20 >= budget.enough:
            break
    return Training(losses, stage)


def loss_of(answers: Tensor, batch: Batch) -> Tensor:
    """Return the cross entropy of the answers asked for, or their mean square error."""
    asked = batch.asked
    if batch.labels.is_floating_point():
        return F.mse_loss(answers[asked], batch.labels[asked])
    return F.cross_entropy(answers[asked], batch.labels[asked])


def judgement(task: Task, answers: Tensor, labels: Tensor) -> Judgement:
    """Score answers ``[B, T, outputs]``, all of them and each sequence's last."""
    scores = task.score(answers, labels)
    counts = Batch(answers, labels).asked.sum(1)
    return Judgement(scores.mean().item(), scores[counts.cumsum(0) - 1].mean().item())


@torch.no_grad()
def judge(model: nn.Module, task: Task, count: int) -> Judgement:
    """Score a model on so many sequences, the same ones for every model.

    Args:
        model: From inputs to answers.
        task: What to draw.
        count: How many sequences.

    Returns:
        The scores.
    """
    model.eval()
    batch = task.draw(count, torch.Generator().manual_seed(_JUDGED))
    rows = max(1, _PIECE // task.length)
    answers = torch.cat([model(piece) for piece in batch.inputs.split(rows)])
    return judgement(task, answers, batch.labels)


def one_thread() -> AbstractContextManager[None]:
    """Run on one thread, for tensors so small that sharing them costs more than it saves."""
    return threads(1)


def trial(
    chosen: Contender,
    task: Task,
    budget: Budget,
    seed: int,
    *,
    factors: Sequence[int] = (1,),
    stages: Sequence[Task] = (),
    progress: Callable[[float], None] = lambda fraction: None,
) -> Row:
    """Train a layer from one seed and judge it at the training's length and at multiples of it.

    Args:
        chosen: The layer.
        task: What it learns.
        budget: How long.
        seed: Draws the weights and the sequences.
        factors: Multiples of the length at which it is judged.
        stages: Easier tasks that come first; see :func:`train`.
        progress: Called with the fraction done.

    Returns:
        The row. torch's generator is afterwards what it was.

    Raises:
        FloatingPointError: If the loss is not finite.
    """
    begin = time.perf_counter()
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(seed)
        layers = chosen.make()
        model = ProbeModel(task, layers, budget.width, budget.feed_forward)
        done = train(model, (*stages, task), budget, torch.Generator().manual_seed(seed), progress)
        judged = {str(factor): judge(model, task.longer(factor), budget.judged) for factor in factors}
        one = task.draw(1, torch.Generator().manual_seed(_JUDGED)).inputs
        state_bytes = model.state_bytes(one)
    return Row(
        chosen.name, seed, {f: j.score for f, j in judged.items()}, {f: j.last for f, j in judged.items()},
        sum(p.numel() for p in model.parameters()), state_bytes, len(done.losses), time.perf_counter() - begin,
        done.losses,
    )  # fmt: skip
