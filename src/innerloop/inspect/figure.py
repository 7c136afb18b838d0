"""A trace as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from innerloop.inspect.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

PANELS = 4
"""Axes that :func:`draw` takes."""
_NAMED = 40
"""Tokens up to which every one is named along an axis."""


def draw(found: Trace, head: int, surprise: Axes, written: Axes, rank: Axes, returns: Axes) -> None:
    """Draw one head: surprise, write and half-life by token, the rank, and what each read is made of.

    Args:
        found: The trace.
        head: Which value head.
        surprise: Axes for the surprise of each token.
        written: Axes for the share written, and the half-life of what was.
        rank: Axes for the effective rank.
        returns: Axes for the parts of each read.
    """
    places = range(len(found.tokens))
    surprise.bar(places, found.surprise[head].tolist(), color="C0")
    surprise.set(ylabel="|v - m(k)|", title="Surprise")
    written.bar(places, found.written[head].tolist(), color="C1")
    written.set(ylabel="share of the surprise", title="Written")
    for place, life in enumerate(found.half_life[head].tolist()):
        if life < float("inf"):
            top = max(0.0, found.written[head, place].item())
            written.annotate(f"{life:.0f}", (place, top), ha="center", fontsize=7)
    named = [surprise, written]
    if found.rank is None:
        _say(rank, "State", "a deep network")
    else:
        rank.step(places, found.rank[head].tolist(), where="mid", color="C2")
        rank.set(ylabel="effective rank", title="State", ylim=(0, None))
        named.append(rank)
    if found.returns is None:
        _say(returns, "What reads return", "a network's reads are no sum")
    else:
        _draw_parts(found.returns[head], found.tokens, returns)
        named.append(returns)
    for axes in named:
        if len(found.tokens) <= _NAMED:
            axes.set_xticks(list(places), found.tokens, rotation=90, fontsize=7)


def _draw_parts(parts: Tensor, tokens: list[str], returns: Axes) -> None:
    limit = max(parts.abs().max().item(), 1e-12) if parts.numel() else 1.0
    returns.imshow(parts.tolist() or [[0.0]], cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto",
                   interpolation="nearest")  # fmt: skip
    returns.set(xlabel="token written", ylabel="token read", title="What reads return")
    if len(tokens) <= _NAMED:
        returns.set_yticks(range(len(tokens)), tokens, fontsize=7)


def _say(axes: Axes, title: str, words: str) -> None:
    axes.set_axis_off()
    axes.set_title(title)
    axes.text(0.5, 0.5, words, ha="center", va="center")
