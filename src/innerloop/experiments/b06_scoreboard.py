"""B6: every layer that can be trained, and softmax attention, as a language model at one budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from innerloop.data import PairTokenizer, Tokenizer, Windows, shuffled, time_machine, windows
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table
from innerloop.lm import Config
from innerloop.lm.kinds import KINDS
from innerloop.training import TrainingOptions
from innerloop.training.scoreboard import Row, cells, summarised, train_row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

VOCABULARY, LENGTH = 1_027, 32
STEPS, BATCH, JUDGED = 40, 64, 500
QUICK_STEPS, QUICK_JUDGED = 6, 250
RATE = 3e-3
"""Ten times the document's, at which so few updates are lost in the noise of dropout."""
DOCUMENT = 83.7
"""After ten epochs, of Gated DeltaNet alone."""
HALF = VOCABULARY / 2
"""Half of what who knows nothing has. Frequencies alone give less, but may take a slow layer more than 40 updates."""
LAYERS = tuple(KINDS)


def run(settings: Settings) -> Result:
    """Train a row a layer; each is kept as soon as it is there."""
    text = time_machine(settings.data)
    tokenizer = PairTokenizer.learn([text.content], VOCABULARY, alphabet="seen")
    tokens = tokenizer.encode(text.content)
    data = windows(tokens, LENGTH)
    rows = []
    for number, name in enumerate(LAYERS):

        def told(fraction: float, done: int = number) -> None:
            settings.progress((done + fraction) / len(LAYERS))

        row = partial(_row, name, data, tokenizer, quick=settings.quick, told=told)
        rows.append(settings.part(name, lambda make=row: asdict(make())))
    stand_in = {} if text.is_time_machine else {"short": f"Trained on the {text.name}: {text.reason}."}
    steps = QUICK_STEPS if settings.quick else STEPS
    return {
        **stand_in, "text": text.name, "tokens": len(tokens), "steps": steps, "rows": rows,
        "frequencies": frequencies(data), "threads": torch.get_num_threads(),
    }  # fmt: skip


def _row(name: str, data: Windows, tokenizer: Tokenizer, *, quick: bool, told: Callable[[float], None]) -> Row:
    steps, judged = (QUICK_STEPS, QUICK_JUDGED) if quick else (STEPS, JUDGED)
    config = Config(
        vocab_size=len(tokenizer), width=128, depth=2, heads=2, pattern=name, feed_forward_width=256, tied=False,
        dropout=0.3,
    )  # fmt: skip
    options = TrainingOptions(
        steps=steps, batch=BATCH, part=64, length=LENGTH, rate=RATE, final_rate=1.0, weight_decay=0.0, beta2=0.999,
        clip=1.0,
    )  # fmt: skip

    def chosen(step: int) -> Tensor:
        order = shuffled(np.arange(step * BATCH, (step + 1) * BATCH), len(data.train), options.seed)
        return data.train[torch.from_numpy(order)]

    held = data.validation[:: len(data.validation) // judged]
    return train_row(config, options, chosen, held, tokenizer, len(data.train) / BATCH, told)


def frequencies(data: Windows) -> float:
    """Return the perplexity of who knows each token's frequency in the training text, and nothing else."""
    train = torch.cat((data.train[:, 0], data.train[-1, 1:]))
    counts = torch.bincount(train, minlength=VOCABULARY).double() + 1
    held = torch.cat((data.validation[:, 0], data.validation[-1, 1:]))
    return math.exp(-(counts / counts.sum()).log()[held].mean().item())


def check(result: Result) -> None:
    """Every layer is there and has learned."""
    rows = [Row(**row) for row in result["rows"]]
    missing = sorted(set(LAYERS) - {row.pattern for row in rows})
    assert not missing, f"no row of {', '.join(missing)}"
    for row in rows:
        assert math.isfinite(row.perplexity), f"{row.pattern} ends at perplexity {row.perplexity}"
        first, last = row.losses[0], row.losses[-1]
        assert last < first, f"{row.pattern} goes from a loss of {first:.4f} to {last:.4f}"
        if result["steps"] == STEPS:
            assert row.perplexity < HALF, f"{row.pattern} ends at perplexity {row.perplexity:.1f}, wanted {HALF:.1f}"


def tables(result: Result) -> list[Table]:
    """A line a layer, the best first."""
    rows = sorted((Row(**row) for row in result["rows"]), key=lambda row: row.perplexity)
    lines: list[tuple[str | int | float, ...]] = [cells(summarised([row])) for row in rows]
    columns = ("layer", "perplexity", "bits a character", "parameters", "s an epoch", "state bytes", "decoded tokens/s")
    note = (
        f"{result['text']}, {result['steps']} updates a row on {result['threads']} threads, one seed: differences of a "
        f"few are noise. Frequencies alone give {result['frequencies']:.1f}. The document has one row, {DOCUMENT} "
        "after ten epochs; docs/scoreboard.md has three seeds of more updates."
    )
    return [Table("Every layer at one budget", columns, lines, note)]


def _draw(result: Result, learning: Axes, cost: Axes) -> None:
    from matplotlib.ticker import NullFormatter

    rows = sorted((Row(**row) for row in result["rows"]), key=lambda row: row.perplexity)
    colours = {rows[0].pattern: "C0", rows[-1].pattern: "C1", "softmax_attention": "C2"}
    for row in rows:
        named = row.pattern in colours
        colour, label = (colours[row.pattern], row.pattern) if named else ("#808080", None)
        learning.plot(range(1, len(row.losses) + 1), row.losses, color=colour, label=label, alpha=1 if named else 0.4)
    learning.set(xlabel="update", ylabel="cross entropy a token", title="Learning")
    learning.legend()
    cost.plot([row.seconds_per_epoch for row in rows], [row.perplexity for row in rows], "o", color="C0")
    for row in (rows[0], rows[-1], max(rows, key=lambda row: row.seconds_per_epoch)):
        cost.annotate(row.pattern, (row.seconds_per_epoch, row.perplexity), xytext=(-4, 5), textcoords="offset points",
                      ha="right")  # fmt: skip
    cost.set(xlabel="seconds an epoch", ylabel="perplexity", xscale="log", title="What it takes")
    cost.margins(x=0.3, y=0.1)
    cost.xaxis.set_minor_formatter(NullFormatter())


def figures(result: Result) -> list[Figure]:
    """Show how each learns, and what it takes."""
    caption = "First the loss of every layer, then where it ends against the time that an epoch takes."
    return [Figure("Layers at one budget", caption, partial(_draw, result), panels=2)]


EXPERIMENT = Experiment(
    name="B6",
    title="Every layer at one budget",
    claim="Layers that differ only in their memory can be compared at the same budget.",
    source="Dive into Deep Learning §12.5.4.1, DeltaNet: a language model",
    setting="As B5: The Time Machine, byte pairs of 1,027, windows of 32 tokens, two blocks of width 128 with 2 heads "
    f"and an inner width of 256, dropout 0.3; the layers as published; Adam at {RATE}, seed 0, {STEPS} updates of "
    f"{BATCH} windows a row (quick: {QUICK_STEPS}); docs/scoreboard.md has 300 updates from three seeds.",
    band=f"Every layer has a row, its loss falls, and it ends below a perplexity of {HALF:.1f}, half of the words; "
    "quick: its loss falls.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=900,
    quick_seconds=120,
    alone=True,
)
