"""Rows of a table that are kept one by one: a dataclass a file, under a key that says what it is good for."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

Kind = TypeVar("Kind")


def row_name(layer: str, seed: int) -> str:
    """Return the name of the file of a layer's row: what of its name a file may hold, and a mark of all of it."""
    name = "".join(letter if letter.isalnum() or letter in "_-." else "-" for letter in layer)
    # The end of a long name, for a user's layer begins with the way to its file.
    return f"{name[-80:]}.{hashlib.sha256(layer.encode()).hexdigest()[:8]}.{seed}.json"


def read_row(path: Path, kind: type[Kind], key: str, version: int) -> Kind | None:
    """Return the row that is kept under this key; None if there is none, or it is another's or torn."""
    try:
        stored = json.loads(path.read_text("utf-8"))
        if stored.pop("version") != version or stored.pop("key") != key:
            return None
        names = {field.name for field in fields(kind)}  # pyright: ignore[reportArgumentType] - a dataclass
        return kind(**stored) if stored.keys() == names else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
