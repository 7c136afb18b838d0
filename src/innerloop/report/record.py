"""What one run of an experiment leaves on disk."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from innerloop.files import write_text

Verdict = Literal["passed", "short", "failed"]
"""``short``: the check held, but less was run than the document states; the record's message says what."""

FORMAT = 1
_TYPES = {
    "name": str, "key": str, "verdict": str, "message": str, "traceback": str, "result": (dict, type(None)),
    "seconds": (int, float), "quick": bool, "data": str, "command": str, "finished": str, "torch": str,
    "commit": (str, type(None)), "machine": dict,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Record:
    """One result with all that is needed to trust it, to show it and to run it again."""

    name: str
    key: str
    """Hash of the code and the settings that made the result."""
    verdict: Verdict
    message: str
    """Why the verdict is not ``passed``; empty otherwise."""
    traceback: str
    """Where an exception came from; empty unless one did."""
    result: dict[str, Any] | None
    """What the run returned; None if it raised."""
    seconds: float
    quick: bool
    """Whether the shortened variant was run."""
    data: str
    """The file or folder of texts that was named; empty if none was."""
    command: str
    """What to type to run it again."""
    finished: str
    """Date and time, UTC."""
    torch: str
    commit: str | None
    machine: dict[str, Any]
    """Its ``cores``, ``cpu`` and ``python``."""

    def write(self, path: Path) -> None:
        """Store the record, whole or not at all."""
        write_text(path, json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """Load a record; None where there is none, or the file is torn or not one of ours."""
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(stored, dict) or stored.pop("format", None) != FORMAT:
            return None
        if stored.keys() != {field.name for field in fields(cls)}:
            return None
        if stored["verdict"] not in get_args(Verdict):
            return None
        if not all(isinstance(stored[name], kind) for name, kind in _TYPES.items()):
            return None
        return cls(**stored)
