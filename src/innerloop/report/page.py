"""Writes the page: every claim with its setting, its numbers beside ours, its verdict and its pictures."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from innerloop.files import write_text
from innerloop.report.drawing import draw
from innerloop.report.palette import DARK, LIGHT, declarations
from innerloop.report.record import Record
from innerloop.report.walk import write_walk

if TYPE_CHECKING:
    from innerloop.experiments.experiment import Experiment, Figure, Table

DOCUMENTS = {
    "A": ("Learning at test time", "Dive into Deep Learning §12.6"),
    "B": ("DeltaNet: memory that edits", "Dive into Deep Learning §12.5"),
    "C": ("Training a HOPE block", "NL-3 aside"),
    "D": ("What this library says of itself", "docs/design.md"),
}
VERDICTS = {"passed": ("✓", "pass"), "short": ("◐", "short"), "failed": ("✗", "failed"), "absent": ("–", "not run")}
_NUMBER = re.compile(r"[<>≤≥≈±~]?\s*[-−+]?(\d[\d.,]*(e[-+]?\d+)?|inf|nan)(\s*(±|%|s|ms|×).*)?", re.IGNORECASE)
_MANY = 7
"""Columns of a table from which on its type is small."""
_NOTHING = {"", "-", "--", "–", "—", "not run", "not printed"}


@dataclass(frozen=True)
class Entry:
    """An experiment and what its last run left; None if it has not run."""

    experiment: Experiment
    record: Record | None


@dataclass(frozen=True)
class Page:
    """What was written."""

    path: Path
    broken: list[str]
    """Experiments whose result could not be shown."""


@dataclass(frozen=True)
class _Grid:
    title: str
    columns: list[tuple[str, str]]
    """Heading, and the class of its column."""
    rows: list[list[tuple[str, str]]]
    """Text and class of each cell."""
    note: str

    @property
    def dense(self) -> bool:
        """Whether it has so many columns that they fit in small type alone."""
        return len(self.columns) >= _MANY


@dataclass(frozen=True)
class _Picture:
    title: str
    caption: str
    panels: list[Markup]


@dataclass
class _View:
    experiment: Experiment
    record: Record | None
    verdict: str
    message: str = ""
    trace: str = ""
    grids: list[_Grid] | tuple[()] = ()
    pictures: list[_Picture] | tuple[()] = ()
    walk: str = ""
    """File of the page that steps through it; empty if there is none."""


@dataclass(frozen=True)
class _Section:
    title: str
    source: str
    views: list[_View]
    file: str
    """Its own page."""


def write_page(entries: Sequence[Entry], folder: Path) -> Page:
    """Write ``index.html``, which needs nothing else, a page a document, and each picture as a file in ``figures``.

    Args:
        entries: What to show, in order.
        folder: Where to write; it must exist.

    Returns:
        The page's path, and the experiments whose result could not be shown.
    """
    (folder / "figures").mkdir(exist_ok=True)
    views = [_view(entry, folder) for entry in entries]
    environment = Environment(
        loader=PackageLoader("innerloop.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(prose=_prose, duration=_duration)
    template = environment.get_template("page.html")

    def write(name: str, title: str, sections: list[_Section]) -> Path:
        shown = [view for section in sections for view in section.views]
        text = template.render(
            title=title,
            whole=name == "index.html",
            sections=sections,
            counts=Counter(view.verdict for view in shown),
            verdicts=VERDICTS,
            machines=_machines(shown),
            total=sum(view.record.seconds for view in shown if view.record),
            light=declarations(LIGHT),
            dark=declarations(DARK),
        )
        write_text(folder / name, text)
        return folder / name

    sections = _sections(views)
    for section in sections:
        write(section.file, section.title, [section])
    path = write("index.html", "the documents’ claims, run again", sections)
    return Page(path, [view.experiment.name for view in views if view.record and view.verdict != view.record.verdict])


def _view(entry: Entry, folder: Path) -> _View:
    experiment, record = entry.experiment, entry.record
    if record is None:
        return _View(experiment, None, "absent")
    view = _View(experiment, record, record.verdict, record.message, record.traceback)
    if record.result is None:
        return view
    try:
        view.grids = [_grid(table) for table in experiment.tables(record.result)]
        drawn = enumerate(experiment.figures(record.result), start=1)
        view.pictures = [_picture(f, f"{experiment.name}-{number}", folder / "figures") for number, f in drawn]
        if experiment.walk is not None:
            name = f"{experiment.name}-walk.html"
            write_walk(experiment.walk(record.result), folder / name)
            view.walk = name
    except Exception as error:
        view.verdict, view.message = "failed", f"The result could not be shown: {error}"
        view.trace = traceback.format_exc()
    return view


def _sections(views: Sequence[_View]) -> list[_Section]:
    letters = dict.fromkeys(view.experiment.name[0] for view in views)
    found = []
    for letter in letters:
        title, source = DOCUMENTS.get(letter, (letter, ""))
        own = [view for view in views if view.experiment.name[0] == letter]
        found.append(_Section(title, source, own, f"{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}.html"))
    return found


def _machines(views: Sequence[_View]) -> list[str]:
    """Where the results come from; one line unless they come from several machines or versions."""
    records = [view.record for view in views if view.record]
    lines = [
        f"{r.machine.get('cpu')}, {r.machine.get('cores')} cores; Python {r.machine.get('python')}, torch {r.torch}"
        + (f"; commit {r.commit}" if r.commit else "")
        for r in records
    ]
    return list(dict.fromkeys(lines))


def _grid(table: Table) -> _Grid:
    rows = [[_cell(cell) for cell in row] for row in table.rows]
    kinds = [_column_class([row[i] for row in rows]) for i in range(len(table.columns))]
    cells = [[(cell, kind or _cell_class(cell)) for cell, kind in zip(row, kinds, strict=True)] for row in rows]
    return _Grid(table.title, list(zip(table.columns, kinds, strict=True)), cells, table.note)


def _column_class(cells: Sequence[str]) -> str:
    """``number`` if that is all the column holds, besides gaps."""
    filled = [cell for cell in cells if cell.strip() not in _NOTHING]
    return "number" if filled and all(map(_NUMBER.fullmatch, filled)) else ""


def _cell_class(cell: str) -> str:
    # A number must not break at its exponent's sign.
    return "whole" if _NUMBER.fullmatch(cell) else ""


def _cell(value: str | int | float) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return "–" if text.strip() in {"-", "--", "—"} else text


def _picture(figure: Figure, slug: str, folder: Path) -> _Picture:
    panels = draw(figure, slug)
    for number, panel in enumerate(panels, start=1):
        name = slug if len(panels) == 1 else f"{slug}-{number}"
        write_text(folder / f"{name}.svg", panel.standalone)
    # matplotlib has escaped every text in it.
    return _Picture(figure.title, figure.caption, [Markup(panel.inline) for panel in panels])


def _prose(text: str) -> Markup:
    """Escape a text; what stands between backticks is code, which may break behind a bracket and a comma."""

    def code(found: re.Match[str]) -> str:
        parts = re.sub(r"([(,])(?=[^ ])", r"\1<wbr>", found[1])
        return f"<code>{parts}</code>"

    return Markup(re.sub(r"`([^`]+)`", code, str(escape(text))))


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"
