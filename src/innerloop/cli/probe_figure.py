"""A probe as a picture: how layers learn a task, or how far beyond the training's length they still do it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from innerloop.experiments.experiment import Figure
from innerloop.probe.summary import ordered, summarised
from innerloop.report.drawing import draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from innerloop.data.tasks import Task
    from innerloop.probe import Row

_NAMED = 8
"""Layers that get a line of the legend; the others are grey."""


def drawn(rows: Sequence[Sequence[Row]], task: Task) -> str:
    """Return the figure as SVG; ``rows`` has the seeds of one layer in each."""
    if len(rows[0][0].last) > 1:
        figure = Figure("Probe", "Score of the last answer by length.", partial(lengths, rows, task))
    else:
        figure = Figure("Probe", "Scores of every seed.", partial(scores, rows, task))
    (panel,) = draw(figure, "probe")
    return panel.standalone


def lengths(rows: Sequence[Sequence[Row]], task: Task, axes: Axes) -> None:
    """Draw the last answer's score against the length, a line a layer, with the spread of its seeds."""
    for place, summary in enumerate(ordered([summarised(found) for found in rows])):
        tokens = [task.longer(int(factor)).length for factor in summary.last]
        named = place < _NAMED
        colour, label = (f"C{place % 6}", _short(summary.layer)) if named else ("#808080", None)
        means, spreads = list(summary.last.values()), list(summary.last_spreads.values())
        axes.errorbar(tokens, means, yerr=spreads, marker="o", color=colour, label=label)
    axes.axvline(task.length, color="#808080", linestyle=":", linewidth=1)
    axes.axhline(task.chance, color="#808080", linestyle="--", linewidth=1)
    axes.set(xlabel="tokens (dotted: as trained)", ylabel="score of the last answer", xscale="log", title=task.name)
    axes.legend()


def scores(rows: Sequence[Sequence[Row]], task: Task, axes: Axes) -> None:
    """Draw the score of every seed, a line a layer, the best on top."""
    found = {found[0].layer: [row.scores["1"] for row in found] for found in rows}
    names = [summary.layer for summary in reversed(ordered([summarised(found) for found in rows]))]
    for place, name in enumerate(names):
        axes.plot(found[name], [place] * len(found[name]), "o", color="C0", alpha=0.7)
    axes.axvline(task.chance, color="#808080", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(names)), [_short(name) for name in names])
    axes.set(xlabel="score (dashed: chance)", ylim=(-0.7, len(names) - 0.3), title=task.name)
    if axes.figure is not None:
        width, height = axes.figure.get_size_inches()  # pyright: ignore[reportAttributeAccessIssue]
        axes.figure.set_size_inches(width, max(height, 0.6 + 0.25 * len(names)))  # pyright: ignore[reportAttributeAccessIssue]


def _short(name: str) -> str:
    return name if len(name) <= 40 else f"...{name[-37:]}"
