"""What an experiment is: a claim, a seeded run, a check that can fail, and how to show the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from innerloop.report.walk import Walk

Result = dict[str, Any]
"""What a run returns: plain numbers, strings, lists and dicts, written to disk as JSON."""


@dataclass(frozen=True)
class Settings:
    """Where and how much: what a run may depend on besides its own code."""

    quick: bool = False
    data: Path | None = None
    """Folder or file that holds The Time Machine, if the user named one."""
    progress: Callable[[float], None] = field(default=lambda fraction: None, compare=False)
    """Called with the fraction done, from 0 to 1."""
    part: Callable[[str, Callable[[], Result]], Result] = field(default=lambda name, make: make(), compare=False)
    """Makes a part of the result, or finds it where a run that was interrupted has left it under its name."""
    kept: Callable[[str], Path | None] = field(default=lambda name: None, compare=False)
    """Names the file in which a run may leave what the next goes on from, if it is interrupted; None: nothing is."""


@dataclass(frozen=True)
class Table:
    """Rows to print under an experiment; ours beside the document's."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str | int | float, ...]]
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """One picture: ``draw`` receives ``panels`` axes and leaves them finished, colours from the cycle C0 to C5."""

    title: str
    caption: str
    draw: Callable[..., None]
    panels: int = 1


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One row of the documents' claims, reproduced."""

    name: str
    """The short id that the command line takes, such as ``A1``."""
    title: str
    claim: str
    source: str
    """Document and section that make the claim."""
    setting: str
    """What is run, in words."""
    band: str
    """What must hold for the claim to count as reproduced, in words."""
    run: Callable[[Settings], Result]
    check: Callable[[Result], None]
    """Raises AssertionError with the numbers when the claim is not reproduced."""
    tables: Callable[[Result], list[Table]]
    figures: Callable[[Result], list[Figure]]
    seconds: float
    """Rough time on two cores, for the first estimate only."""
    quick_seconds: float | None = None
    """The same under ``quick``, where it differs."""
    alone: bool = False
    """Whether it measures time, so that nothing may run beside it."""
    walk: Callable[[Result], Walk] | None = None
    """What a page of its own lets the reader step through, token by token."""
