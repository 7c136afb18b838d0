"""One process's part of a run: updates, logs and checkpoints in their order."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch

from innerloop.checks import check_field, check_least
from innerloop.data import Tokenizer, Tokens
from innerloop.lm import LanguageModel
from innerloop.training.checkpoint import Checkpoint, newest
from innerloop.training.evaluation import Score, windows_score
from innerloop.training.learner import Learner, Update
from innerloop.training.log import Board, Log
from innerloop.training.plan import Plan

_UPDATES = ("step", "tokens", "loss", "rate", "norm", "seconds", "tokens_per_second")
_VALIDATION = ("step", "loss", "perplexity", "bits_per_byte")


class Watch(Protocol):
    """Someone who is told how a run goes."""

    def begun(self, step: int, steps: int, tokens: int) -> None:
        """So many updates are behind, so many there will be, of so many tokens each."""

    def updated(self, step: int, update: Update, seconds: float) -> None:
        """An update was taken, in so many seconds."""

    def logged(self, step: int, loss: float, tokens_per_second: float) -> None:
        """A line of the log was written: means since the last one."""

    def validated(self, step: int, score: Score) -> None:
        """The text to validate on was looked at."""

    def saved(self, step: int) -> None:
        """A checkpoint is whole."""


@dataclass
class Counts:
    """What is counted from update to update, and written with each checkpoint."""

    loss: float = 0.0
    """Sum since the last line of the log."""
    updates: int = 0
    """Since then."""
    since: float = 0.0
    """Seconds since then."""
    seconds: float = 0.0
    """Of all updates."""
    log: int | None = None
    """Bytes of the log."""
    validation: int | None = None
    """Bytes of the log of validation."""

    @classmethod
    def of(cls, values: dict[str, Any]) -> Counts:
        """Return what ``asdict`` made this of; TypeError or ValueError if it did not."""
        wanted = {field.name: field.type for field in fields(cls)}
        if odd := sorted(wanted.keys() ^ values.keys()):
            raise ValueError(f"{odd[0]} {'is missing' if odd[0] in wanted else 'is one too many'}")
        for name, value in values.items():
            check_field(name, wanted[name], value)
            if value is not None:
                check_least(name, value, 0)
        return cls(**values)


class Session:
    """What one process does of a run: it starts where the newest checkpoint is."""

    def __init__(self, folder: Path, plan: Plan, tokens: Tokens, tokenizer: Tokenizer, watch: Watch) -> None:
        """Read that checkpoint, or draw the first weights; torch's generator is set."""
        self.folder, self.tokens, self.tokenizer = folder, tokens, tokenizer
        self.watch, self.options = watch, plan.options
        torch.manual_seed(self.options.seed)
        self.learner = Learner(LanguageModel(plan.config), self.options)
        found = newest(folder)
        checkpoint = Checkpoint.now(0, asdict(Counts())) if found is None else Checkpoint.read(found, self.learner)
        torch.set_rng_state(checkpoint.random)
        self.step = checkpoint.step
        try:
            self.counts = Counts.of(checkpoint.progress)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{found} must say what it has counted; it is damaged: {error}") from None
        self.log = Log(folder / "log.csv", _UPDATES, self.counts.log)
        self.validation_log = Log(folder / "validation.csv", _VALIDATION, self.counts.validation)
        self.board = Board(folder / "tensorboard", self.step, wanted=plan.board)
        self.windows = tokens.validation(self.options.length, self.options.evaluate_windows)
        self.tokens_each = self.options.batch * self.options.length

    def close(self) -> None:
        """Close the logs."""
        for log in (self.log, self.validation_log, self.board):
            log.close()

    def train(self, stop: Callable[[], bool]) -> int:
        """Update, log, look and save until the end or until ``stop`` says so; return the last checkpoint's step."""
        options = self.options
        self.watch.begun(self.step, options.steps, self.tokens_each)
        saved = self.step
        while self.step < options.steps:
            self._update()
            last = self.step == options.steps
            if last or self.step % options.log_every == 0:
                self._log()
            if len(self.windows) and (last or self.step % options.evaluate_every == 0):
                self._validate()
            stopping = stop()
            if last or stopping or self.step % options.save_every == 0:
                self._save()
                saved = self.step
            if stopping:
                break
        return saved

    def _update(self) -> None:
        begin = time.perf_counter()
        batch = self.tokens.batch(
            self.step, self.options.batch, self.options.length, self.options.window_stride, self.options.seed
        )
        self.update = self.learner.update(batch, self.step)
        seconds = time.perf_counter() - begin
        self.step += 1
        self.counts.loss += self.update.loss
        self.counts.updates += 1
        self.counts.since += seconds
        self.counts.seconds += seconds
        self.watch.updated(self.step, self.update, seconds)

    def _log(self) -> None:
        counts, update = self.counts, self.update
        loss, pace = counts.loss / counts.updates, counts.updates * self.tokens_each / counts.since
        seen = self.step * self.tokens_each
        self.log.write((self.step, seen, loss, update.rate, update.norm, f"{counts.seconds:.3f}", f"{pace:.1f}"))
        self.board.show(self.step, loss=loss, rate=update.rate, norm=update.norm, tokens_per_second=pace)
        self.watch.logged(self.step, loss, pace)
        counts.loss, counts.updates, counts.since = 0.0, 0, 0.0

    def _validate(self) -> None:
        score = windows_score(self.learner.model, self.tokenizer, self.windows)
        self.validation_log.write((self.step, score.loss, score.perplexity, score.bits_per_byte))
        self.board.show(self.step, validation_loss=score.loss, bits_per_byte=score.bits_per_byte)
        self.watch.validated(self.step, score)

    def _save(self) -> None:
        self.board.settle()
        self.counts.log, self.counts.validation = self.log.settle(), self.validation_log.settle()
        Checkpoint.now(self.step, asdict(self.counts)).write(self.folder, self.learner, self.tokenizer)
        self.watch.saved(self.step)
