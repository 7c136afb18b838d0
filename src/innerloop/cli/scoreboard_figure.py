"""The scoreboard as a picture: how well each layer predicts against the state it carries."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from innerloop.experiments.experiment import Figure
from innerloop.report.drawing import draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from innerloop.training.scoreboard import Summary


def drawn(summaries: list[Summary]) -> str:
    """Return the figure as SVG: layers from the best to the worst, with the spread of their seeds."""
    figure = Figure("Scoreboard", "Perplexity of each layer, with the spread of its seeds.", partial(bars, summaries))
    (panel,) = draw(figure, "scoreboard")
    return panel.standalone


def bars(summaries: list[Summary], axes: Axes) -> None:
    """Draw a line a layer, the best on top."""
    ordered = sorted(summaries, key=lambda x: -x.perplexity)
    places = range(len(ordered))
    axes.errorbar(
        [x.perplexity for x in ordered], list(places), xerr=[x.perplexity_spread for x in ordered], fmt="o", color="C0"
    )
    axes.set_yticks(list(places), [x.pattern for x in ordered])
    axes.set(xlabel="perplexity of the text held out", ylim=(-0.7, len(ordered) - 0.3))
    if axes.figure is not None:
        width, height = axes.figure.get_size_inches()  # pyright: ignore[reportAttributeAccessIssue]
        axes.figure.set_size_inches(width, max(height, 0.6 + 0.25 * len(ordered)))  # pyright: ignore[reportAttributeAccessIssue]
