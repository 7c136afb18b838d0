"""Rows of one plan in a folder, a file each, so that what was interrupted goes on with those that are missing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from innerloop import files
from innerloop.data.tasks import Task
from innerloop.probe.contender import Contender
from innerloop.probe.trial import Budget, Row, trial
from innerloop.rows import read_row, row_name

VERSION = 1
"""Of the files."""


@dataclass(frozen=True)
class Plan:
    """What every row of a board shares."""

    task: Task
    budget: Budget
    factors: tuple[int, ...] = (1,)
    """Multiples of the training's length at which layers are judged, 1 first."""

    def to_dict(self) -> dict[str, object]:
        """Return it as JSON can hold it."""
        made = {"task": self.task.name, "sizes": asdict(self.task), **asdict(self.budget), "factors": self.factors}
        return json.loads(json.dumps({"version": VERSION, **made}))


class Board:
    """A folder with the rows of one plan."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        """Take a folder that is this plan's; ``at`` sees to that."""
        self.folder, self.plan = folder, plan

    @classmethod
    def at(cls, folder: str | os.PathLike[str], plan: Plan) -> Board:
        """Begin a board, or go on with one.

        Args:
            folder: To be made, unless it holds a board of the same plan.
            plan: What its rows share.

        Returns:
            The board.

        Raises:
            ValueError: If the folder holds a board of another plan.
            FileExistsError: If it holds something else.
            OSError: If it cannot be written.
        """
        folder, wanted = Path(folder), plan.to_dict()
        note = folder / "probe.json"
        if note.is_file():
            try:
                found = json.loads(note.read_text("utf-8"))
            except ValueError:
                found = {}
            odd = [name for name in wanted if not isinstance(found, dict) or found.get(name) != wanted[name]]
            if odd:
                raise ValueError(f"{folder} must hold a probe like this one; it differs in {', '.join(odd)}. "
                                 "Name another folder")  # fmt: skip
            return cls(folder, plan)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileExistsError(f"{folder} must be new or empty, or hold a probe; it holds something else")
        folder.mkdir(parents=True, exist_ok=True)
        files.write_text(note, json.dumps(wanted, indent=1) + "\n")
        return cls(folder, plan)

    def file(self, layer: str, seed: int) -> Path:
        """Where a row is kept."""
        return self.folder / "rows" / row_name(layer, seed)

    def row(
        self, chosen: Contender, seed: int, progress: Callable[[float], None] = lambda fraction: None
    ) -> tuple[Row, bool]:
        """Return a row, and whether it was run now rather than found.

        Args:
            chosen: The layer; if it stands in a user's file that has changed, the row runs again.
            seed: Of weights and sequences.
            progress: Called with the fraction done.

        Returns:
            The row, which is on the disk, and whether it is new.

        Raises:
            FloatingPointError: If the loss is not finite.
            OSError: If it cannot be written.
        """
        path, key = self.file(chosen.name, seed), f"{torch.__version__} {chosen.key}".strip()
        found = read_row(path, Row, key, VERSION)
        if found is not None:
            return found, False
        plan = self.plan
        row = trial(chosen, plan.task, plan.budget, seed, factors=plan.factors, progress=progress)
        path.parent.mkdir(exist_ok=True)
        files.write_text(path, json.dumps({"version": VERSION, "key": key, **asdict(row)}) + "\n")
        return row, True
