"""Draws an experiment's figures as SVG: text stays text, and colours become the page's own."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cycler import cycler
from matplotlib import style
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure as Canvas

from innerloop.report.palette import CYCLE, LIGHT

if TYPE_CHECKING:
    from innerloop.experiments.experiment import Figure

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_SIZES = {1: (4.7, 3.0), 2: (3.7, 3.1)}  # inches; the page scales them, and 9 points stay legible on a phone
_SMALL = (2.8, 2.6)
_ID = re.compile(r'(\bid="|xlink:href="#|href="#|url\(#)')
_FAMILY = re.compile(r"font-family: [^;\"]+")
# Black and mid-grey are what a figure gets that names no colour of the cycle.
_ROLES = {colour: role for role, colour in LIGHT.items()} | {"#000000": "ink", "#808080": "quiet"}


@dataclass(frozen=True)
class Panel:
    """One set of axes as SVG."""

    inline: str
    """For the page: colours are CSS variables, identifiers are the page's alone."""
    standalone: str
    """For a file: fixed light colours on their own paper."""


def draw(figure: Figure, slug: str) -> list[Panel]:
    """Draw a figure, each panel as a picture of its own, so that a narrow page can stack them.

    Args:
        figure: What to draw.
        slug: Name in the page, unlike any other's.

    Returns:
        One SVG a panel, in order.
    """
    legend = 8.5 if figure.panels <= 2 else 7.5
    with style.context(look() | {"legend.fontsize": legend}):
        size = _SIZES.get(figure.panels, _SMALL)
        canvases = [Canvas(figsize=size, layout="constrained") for _ in range(figure.panels)]
        figure.draw(*(canvas.add_subplot() for canvas in canvases))
        return [_panel(_svg(canvas), f"{slug}-{number}") for number, canvas in enumerate(canvases, start=1)]


def look() -> dict[str, Any]:
    """Return matplotlib's settings for all figures."""
    ink, quiet = LIGHT["ink"], LIGHT["quiet"]
    return {
        "svg.fonttype": "none", "svg.hashsalt": "innerloop", "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"], "font.size": 9, "axes.titlesize": 9.5, "axes.labelsize": 9,
        "xtick.labelsize": 8.5, "ytick.labelsize": 8.5,
        "figure.facecolor": LIGHT["paper"], "savefig.facecolor": LIGHT["paper"], "axes.facecolor": LIGHT["paper"],
        "text.color": ink, "axes.labelcolor": ink, "axes.titlecolor": ink, "legend.labelcolor": ink,
        "xtick.color": quiet, "ytick.color": quiet, "axes.edgecolor": quiet, "axes.linewidth": 0.8,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
        "grid.color": LIGHT["grid"], "grid.linewidth": 0.8, "lines.linewidth": 1.7,
        "legend.frameon": True, "legend.framealpha": 0.85, "legend.facecolor": LIGHT["paper"],
        "legend.edgecolor": "none", "image.cmap": "viridis", "axes.unicode_minus": True,
        "axes.prop_cycle": cycler(color=[LIGHT[role] for role in CYCLE]),
    }  # fmt: skip


def _svg(canvas: Canvas) -> str:
    for axes in canvas.axes:
        if axes.images or any(isinstance(artist, QuadMesh) for artist in axes.collections):
            axes.grid(False)  # it would lie over a heat map
    page = io.BytesIO()
    canvas.savefig(page, format="svg", dpi=200, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = page.getvalue().decode("utf-8")
    return text[text.index("<svg") :]  # the prologue before it names outside addresses


def _panel(svg: str, slug: str) -> Panel:
    # Identifiers repeat from picture to picture and would clash in one page.
    svg = _ID.sub(rf"\g<1>{slug}-", svg)
    svg = _FAMILY.sub(f"font-family: {FONT}", svg)
    # The page scales it, and a style sheet inside the page would reach all of it.
    head, body = svg.split(">", 1)
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)
    inline = re.sub(r' (width|height)="[^"]*"', "", head) + ">" + body
    for colour, role in _ROLES.items():
        inline = re.sub(rf"{colour}\b", f"var(--{role})", inline)
    return Panel(inline, svg)
