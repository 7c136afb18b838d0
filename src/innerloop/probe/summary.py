"""Rows of one layer joined, and the table of all."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from innerloop.data.tasks import Task
from innerloop.probe.trial import Row


@dataclass(frozen=True)
class Summary:
    """One layer over its seeds: means, and the spread of seeds (the sample's standard deviation, 0 for one seed)."""

    layer: str
    seeds: int
    scores: dict[str, float]
    """By factor of the training's length."""
    spreads: dict[str, float]
    last: dict[str, float]
    last_spreads: dict[str, float]
    parameters: int
    state_bytes: int | None
    steps: float
    """Median over the seeds."""
    seconds: float
    """Median over the seeds."""


def summarised(rows: Sequence[Row]) -> Summary:
    """Join the seeds of one layer."""

    def joined(parts: list[dict[str, float]]) -> tuple[dict[str, float], dict[str, float]]:
        columns = {factor: [part[factor] for part in parts] for factor in parts[0]}
        means = {factor: statistics.fmean(column) for factor, column in columns.items()}
        return means, {f: statistics.stdev(c) if len(c) > 1 else 0.0 for f, c in columns.items()}

    first = rows[0]
    return Summary(
        first.layer, len(rows), *joined([row.scores for row in rows]), *joined([row.last for row in rows]),
        first.parameters, first.state_bytes, statistics.median(row.steps for row in rows),
        statistics.median(row.seconds for row in rows),
    )  # fmt: skip


def ordered(summaries: Sequence[Summary]) -> list[Summary]:
    """Return the best first: at the longest length, and where that is equal at the shorter ones."""
    return sorted(summaries, key=lambda x: [-x.last[f] for f in reversed(list(x.last))] + [x.steps])


def columns(summaries: Sequence[Summary]) -> tuple[str, ...]:
    """Return the headings of a table of summaries."""
    factors = list(summaries[0].scores)
    longer = tuple(f"last, {factor}x" for factor in factors)
    return ("layer", "score", *longer, "updates", "parameters", "state bytes", "s")


def cells(summary: Summary) -> tuple[str, ...]:
    """Return a line of that table."""

    def with_spread(value: float, spread: float) -> str:
        return f"{value:.3f}" + (f" ± {spread:.3f}" if summary.seeds > 1 else "")

    last = (with_spread(summary.last[f], summary.last_spreads[f]) for f in summary.last)
    state = "–" if summary.state_bytes is None else f"{summary.state_bytes:,}"
    return (
        summary.layer, with_spread(summary.scores["1"], summary.spreads["1"]), *last, f"{summary.steps:.0f}",
        f"{summary.parameters:,}", state, f"{summary.seconds:.1f}",
    )  # fmt: skip


def stated(task: Task) -> str:
    """Say what a score would be without memory."""
    words = f"chance {task.chance:.3f}"
    return words if task.shortcut == task.chance else f"{words}; knowing what occurred, not where: {task.shortcut:.3f}"


def markdown(summaries: Sequence[Summary], task: Task) -> str:
    """Return the table as Markdown, the best layer first, and what chance is.

    Args:
        summaries: At least one.
        task: On which they were trained.

    Returns:
        Lines of Markdown.
    """
    heads = columns(summaries)
    lines = [heads, ("---", *["---:"] * (len(heads) - 1)), *map(cells, ordered(summaries))]
    body = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{body}\n{task.name}, {task.length} tokens; {stated(task)}.\n"
