"""A page that steps token by token through what a memory did: one HTML file with a plain script, no network."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from innerloop.files import write_text
from innerloop.report.palette import DARK, LIGHT, declarations


@dataclass(frozen=True)
class Walk:
    """What a page shows."""

    title: str
    trace: dict[str, Any]
    """As ``innerloop.inspect.Trace.to_dict`` returns it."""
    intro: str = ""
    asked: tuple[str, ...] = ()
    """What could be asked after each token."""
    answers: tuple[tuple[tuple[str, float], ...], ...] = ()
    """After each token, for each of ``asked``, the answer and how sure it is."""
    right: dict[str, str] | None = None
    """The right answer to each of ``asked`` once all tokens are read."""


def write_walk(walk: Walk, path: Path) -> None:
    """Write the page, whole or not at all.

    Args:
        walk: What to show.
        path: The file.

    Raises:
        ValueError: If there are answers, but not for every token and question.
        OSError: If it cannot be written.
    """
    length = len(walk.trace["tokens"])
    if walk.answers and (len(walk.answers) != length or any(len(row) != len(walk.asked) for row in walk.answers)):
        raise ValueError(f"answers must be {length} tokens by {len(walk.asked)} questions; got {len(walk.answers)} by "
                         f"{len(walk.answers[0])}")  # fmt: skip
    environment = Environment(
        loader=PackageLoader("innerloop.report", "templates"), autoescape=True, undefined=StrictUndefined
    )
    data = {"trace": walk.trace, "asked": walk.asked, "answers": walk.answers, "right": walk.right or {}}
    # Inside of a script element nothing is unescaped, and only a "<" could end it.
    text = json.dumps(data).replace("<", "\\u003c")
    page = environment.get_template("walk.html").render(
        title=walk.title, intro=walk.intro, rule=walk.trace["rule"], data=Markup(text), light=declarations(LIGHT),
        dark=declarations(DARK),
    )  # fmt: skip
    write_text(path, page)
