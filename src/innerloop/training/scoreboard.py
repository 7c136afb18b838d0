"""Layers side by side on one text at one budget: how well they predict, what they take, how fast they are."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from innerloop import files
from innerloop import rows as kept
from innerloop.data import Tokenizer
from innerloop.lm import Config, LanguageModel, parse
from innerloop.threads import threads
from innerloop.training.evaluation import windows_score
from innerloop.training.learner import Learner
from innerloop.training.options import TrainingOptions
from innerloop.training.plan import Plan
from innerloop.training.run import Run

VERSION = 1
"""Of a row's file."""
_DECODED = 32  # tokens
_PROMPT = 64  # tokens before the state is weighed


@dataclass(frozen=True)
class Row:
    """One layer, trained from one seed."""

    pattern: str
    seed: int
    perplexity: float
    bits_per_character: float
    loss: float
    """Nats a token of the text held out."""
    parameters: int
    seconds: float
    """Of all updates."""
    seconds_per_epoch: float
    """What as many updates take as see every training window once, at this pace."""
    state_bytes: int
    """Carried from token to token by one sequence of 64 tokens; attention's grows from there."""
    decode_tokens_per_second: float
    """One sequence, one token at a time."""
    losses: list[float]
    """Of every update."""


@dataclass(frozen=True)
class Summary:
    """One layer over its seeds: means, and the spread of seeds (the sample's standard deviation, 0 for one seed)."""

    pattern: str
    seeds: int
    perplexity: float
    perplexity_spread: float
    perplexities: tuple[float, float]
    """The best and the worst seed's."""
    bits_per_character: float
    bits_spread: float
    parameters: int
    seconds_per_epoch: float
    state_bytes: int
    decode_tokens_per_second: float


def train_row(
    config: Config,
    options: TrainingOptions,
    batch: Callable[[int], Tensor],
    windows: Tensor,
    tokenizer: Tokenizer,
    epoch: float,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Row:
    """Train one model and weigh it.

    Args:
        config: Of the model.
        options: Of its training; the seed draws the first weights and dropout.
        batch: The windows of an update by its number, ``[B, length + 1]``.
        windows: What it is judged on, ``[N, length + 1]``.
        tokenizer: What its tokens mean.
        epoch: Updates that see every training window once.
        progress: Called with the fraction done.

    Returns:
        The row. torch's generator is afterwards what it was.

    Raises:
        FloatingPointError: If the loss is not finite.
    """
    losses, seconds = [], []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        learner = Learner(LanguageModel(config), options)
        for step in range(options.steps):
            begin = time.perf_counter()
            losses.append(learner.update(batch(step), step).loss)
            seconds.append(time.perf_counter() - begin)
            progress((step + 1) / (options.steps + 1))
    model = learner.model.eval()
    score = windows_score(model, tokenizer, windows)
    state_bytes, pace = decoding(model, windows[:1, :-1])
    return Row(
        config.pattern, options.seed, score.perplexity, score.bits_per_character, score.loss,
        sum(p.numel() for p in model.parameters()), sum(seconds), statistics.median(seconds) * epoch, state_bytes, pace,
        losses,
    )  # fmt: skip


@torch.no_grad()
def decoding(model: LanguageModel, prompt: Tensor) -> tuple[int, float]:
    """Return the bytes that the model carries after 64 tokens, and the tokens that it writes in a second."""
    repeated = prompt.repeat(1, math.ceil(_PROMPT / prompt.shape[1]))[:, :_PROMPT]
    _, state = model(repeated)
    ids = model.generate(repeated, max_new_tokens=_DECODED + 1, temperature=0.0)
    next(ids)  # the prompt is read before the first one
    begin = time.perf_counter()
    count = sum(1 for _ in ids)
    return state.nbytes, count / (time.perf_counter() - begin)


class Comparison:
    """Rows of one plan in its folder, a file each, so that what was interrupted goes on with those that are missing."""

    def __init__(self, run: Run) -> None:
        """Compare on the run's text, at its budget."""
        self.run = run

    @classmethod
    def at(
        cls, folder: str | os.PathLike[str], plan: Plan, progress: Callable[[float], None] = lambda fraction: None
    ) -> Comparison:
        """Begin a comparison, or go on with one.

        Args:
            folder: To be made, unless it holds a comparison of the same plan.
            plan: Of which each row changes the pattern and the seed.
            progress: Called with the fraction of the text that is encoded.

        Returns:
            The comparison.

        Raises:
            ValueError: If the folder holds a comparison of another plan, or the text is missing, too short or no text.
            FileExistsError: If the folder holds something else.
            RuntimeError: If a package is missing.
            OSError: If a file cannot be read or written.
        """
        if not (Path(folder) / "run.json").is_file():
            run = Run.prepare(folder, plan, progress)
        else:
            run = Run.open(folder)
            # A comparison goes on with the number of threads that it began with.
            begun, same = run.plan.to_dict(), plan.to_dict().items()
            odd = [name for name, value in same if begun[name] != value and name != "threads"]
            if odd:
                raise ValueError(f"{folder} must hold a comparison like this one; it differs in {', '.join(odd)}. "
                                 "Name another folder")  # fmt: skip
        return cls(run)

    def config(self, pattern: str) -> Config:
        """Return a row's configuration: as deep as the plan's, to whole repeats of the pattern, and at least one."""
        base, length = self.run.plan.config, len(parse(pattern))
        return dataclasses.replace(base, pattern=pattern, depth=length * max(1, (base.depth or 1) // length))

    def file(self, pattern: str, seed: int) -> Path:
        """Where a row is kept."""
        return self.run.folder / "rows" / kept.row_name(pattern, seed)

    def others(self, wanted: Sequence[tuple[str, int]]) -> dict[str, list[Row]]:
        """Return the rows, by pattern, that are kept and not among these patterns and seeds."""
        found: dict[str, list[Row]] = {}
        for path in sorted((self.run.folder / "rows").glob("*.json")):
            row = read_row(path, torch.__version__)
            if row is not None and (row.pattern, row.seed) not in wanted:
                found.setdefault(row.pattern, []).append(row)
        return found

    def row(
        self, pattern: str, seed: int, progress: Callable[[float], None] = lambda fraction: None
    ) -> tuple[Row, bool]:
        """Return a row, and whether it was run now rather than found.

        Args:
            pattern: Of the layers.
            seed: Of weights, order and dropout.
            progress: Called with the fraction done.

        Returns:
            The row, which is on the disk, and whether it is new.

        Raises:
            FloatingPointError: If the loss is not finite.
            OSError: If it cannot be written.
        """
        path = self.file(pattern, seed)
        found = read_row(path, torch.__version__)
        if found is not None:
            return found, False
        plan, tokens = self.run.plan, self.run.tokens
        options = dataclasses.replace(plan.options, seed=seed)
        length, stride = options.length, options.window_stride
        with threads(plan.threads or torch.get_num_threads()):
            row = train_row(
                self.config(pattern), options,
                lambda step: tokens.batch(step, options.batch, length, stride, seed),
                tokens.validation(length, options.evaluate_windows), self.run.tokenizer,
                tokens.training_windows(length, stride) / options.batch, progress,
            )  # fmt: skip
        path.parent.mkdir(exist_ok=True)
        write_row(path, row, torch.__version__)
        return row, True


def write_row(path: Path, row: Row, key: str) -> None:
    """Keep a row, whole or not at all."""
    files.write_text(path, json.dumps({"version": VERSION, "key": key, **asdict(row)}, indent=1) + "\n")


def read_row(path: Path, key: str) -> Row | None:
    """Return the row that is kept under this key; None if there is none, or it is another's or torn."""
    return kept.read_row(path, Row, key, VERSION)


def summarised(rows: list[Row]) -> Summary:
    """Join the seeds of one layer: means of what seeds change, medians of what the machine's other work does."""

    def spread(values: list[float]) -> float:
        return statistics.stdev(values) if len(values) > 1 else 0.0

    perplexity, bits = [row.perplexity for row in rows], [row.bits_per_character for row in rows]
    return Summary(
        rows[0].pattern, len(rows), statistics.fmean(perplexity), spread(perplexity),
        (min(perplexity), max(perplexity)), statistics.fmean(bits), spread(bits), rows[0].parameters,
        statistics.median(row.seconds_per_epoch for row in rows), rows[0].state_bytes,
        statistics.median(row.decode_tokens_per_second for row in rows),
    )  # fmt: skip


COLUMNS = ("layer", "perplexity", "bits a character", "parameters", "s an epoch", "state bytes", "decoded tokens/s")
"""Of a table of summaries."""


def cells(summary: Summary) -> tuple[str, ...]:
    """Return a line of that table."""

    def with_spread(value: float, spread: float, digits: int) -> str:
        return f"{value:.{digits}f}" + (f" ± {spread:.{digits}f}" if summary.seeds > 1 else "")

    return (
        summary.pattern,
        with_spread(summary.perplexity, summary.perplexity_spread, 2),
        with_spread(summary.bits_per_character, summary.bits_spread, 4),
        f"{summary.parameters:,}",
        f"{summary.seconds_per_epoch:.1f}",
        f"{summary.state_bytes:,}",
        f"{summary.decode_tokens_per_second:,.0f}",
    )


def places(summaries: Sequence[Summary]) -> list[tuple[int, int]]:
    """Return the first and the last place that each layer may have, as far as its seeds can tell.

    A layer is before another if its worst seed is before the other's best one. Of two layers that are alike, n seeds
    each, one is before the other with a probability of two in C(2n, n): for three seeds, one in ten.
    """
    best, worst = [x.perplexities[0] for x in summaries], [x.perplexities[1] for x in summaries]
    return [
        (1 + sum(x < own.perplexities[0] for x in worst), len(best) - sum(x > own.perplexities[1] for x in best))
        for own in summaries
    ]


def markdown(summaries: list[Summary]) -> str:
    """Return the table as Markdown, the best layer first; where all have several seeds, with their places."""
    ordered = sorted(summaries, key=lambda x: (math.isnan(x.perplexity), x.perplexity))
    lines = [COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1)), *map(cells, ordered)]
    note = ""
    if len(ordered) > 1 and all(x.seeds > 1 for x in ordered):
        named = [str(a) if a == b else f"{a} to {b}" for a, b in places(ordered)]
        lines = [(*line, place) for line, place in zip(lines, ("place", "---:", *named), strict=True)]
        note = "\nA layer's place counts as better only those all of whose seeds are better than each of its own.\n"
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + note
