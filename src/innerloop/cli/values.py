"""What several commands read in the same way."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from typing import Any

from innerloop.cli.errors import InputError


def parse_settings(words: list[str] | None, record: type, option: str) -> dict[str, Any]:
    """Read ``NAME=VALUE`` words as fields of a record.

    Args:
        words: As they were given; None for none.
        record: A dataclass, which checks the values itself.
        option: What they were given by.

    Returns:
        Values by field: JSON where they are (``0.1``, ``true``, ``{"kda": {}}``), else the word itself.

    Raises:
        InputError: If a word is not of that form, or the record has no such field.
    """
    known = [field.name for field in fields(record)]
    found: dict[str, Any] = {}
    for word in words or ():
        name, sign, value = word.partition("=")
        if not sign:
            raise InputError(f"{option} must be NAME=VALUE; got {word}")
        if name not in known:
            raise InputError(f"{option} must name one of {', '.join(known)}; got {name}")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def settle_threads() -> None:
    """Ask the threads that torch will start to sleep while they wait: spinning takes a busy machine's time."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def one_line(error: Exception) -> str:
    """Return what an error says, without what comes after its first line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error).partition("\n")[0]
