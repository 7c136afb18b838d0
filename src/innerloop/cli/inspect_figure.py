"""A trace as one SVG: a row of four pictures a head."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from matplotlib import style
from matplotlib.figure import Figure

from innerloop.inspect.figure import PANELS, draw
from innerloop.report.drawing import look

if TYPE_CHECKING:
    from innerloop.inspect import Trace


def drawn(trace: Trace) -> str:
    """Return the figure as SVG."""
    heads = len(trace.surprise)
    with style.context(look()):
        canvas = Figure(figsize=(4 * PANELS, 3.2 * heads), layout="constrained")
        axes = canvas.subplots(heads, PANELS, squeeze=False)
        for head in range(heads):
            draw(trace, head, *axes[head])
            axes[head, 3].grid(False)
            axes[head, 0].set_title(f"Head {head}: surprise")
        page = io.BytesIO()
        canvas.savefig(page, format="svg", metadata={"Date": None, "Creator": None})
    text = page.getvalue().decode("utf-8")
    return text[text.index("<svg") :]
