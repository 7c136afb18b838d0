"""What several commands read in the same way."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

from innerloop.cli.errors import InputError

BYTES = 259
"""Ids of a byte-level tokenizer."""


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
        if name in found:
            raise InputError(f"{option} must name each field once; got {name} twice")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def joined(given: dict[str, Any], settings: dict[str, Any], option: str) -> dict[str, Any]:
    """Return both together; InputError if an option of its own and a setting say the same thing."""
    if twice := sorted(given.keys() & settings.keys()):
        raise InputError(f"--{twice[0].replace('_', '-')} and {option} {twice[0]} say the same; leave one out")
    return given | settings


def given_options(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the options among ``names`` that were given, by name."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def vocabulary(arguments: argparse.Namespace) -> dict[str, int]:
    """Return the number of ids as a model's field, where the tokenizer says it; InputError if it cannot be had."""
    if arguments.tokenizer != "pairs":
        if arguments.vocabulary is not None:
            raise InputError("--vocabulary counts byte pairs; it needs --tokenizer pairs")
        return {}
    if arguments.vocabulary is None:
        return {}
    if arguments.vocabulary < BYTES:
        raise InputError(f"--vocabulary must be at least {BYTES}, every byte and the reserved; "
                         f"got {arguments.vocabulary}")  # fmt: skip
    return {"vocab_size": arguments.vocabulary}


def check_column(arguments: argparse.Namespace, *places: str | None) -> None:
    """Refuse a --column where no text has any."""
    from innerloop.data.sources import has_columns

    named = [place for place in places if place is not None]
    if arguments.column is not None and not any(has_columns(place) for place in named):
        raise InputError(f"--column is for records, such as a .jsonl file's; {' and '.join(named)} has none")


def check_seed(arguments: argparse.Namespace) -> None:
    """Refuse a --seed that torch's generator does not take."""
    if arguments.seed is not None and not 0 <= arguments.seed < 1 << 64:
        raise InputError(f"--seed must be at least 0 and below 2^64; got {arguments.seed}")


def filled(word: str) -> str:
    """Return a word that names a file or folder; an empty one would be the folder one stands in."""
    if not word:
        raise argparse.ArgumentTypeError("must name a file or folder; got an empty word")
    return word


def path(word: str) -> Path:
    """Return the path that a word names, which is not empty."""
    return Path(filled(word))


def settle_threads() -> None:
    """Ask the threads that torch will start to sleep while they wait: spinning takes a busy machine's time."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def one_line(error: Exception) -> str:
    """Return what an error says, without what comes after its first line."""
    if isinstance(error, OSError) and error.strerror:
        return escaped(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
    text = str(error)
    # torch explains itself over many lines; a name that we were given may hold the end of one.
    return text.partition("\n")[0] if isinstance(error, RuntimeError) else escaped(text)


def escaped(text: str) -> str:
    """Return the text in one line: whatever moves a terminal's cursor becomes its escape."""
    return "".join(letter if ord(letter) >= 32 and ord(letter) != 127 else repr(letter)[1:-1] for letter in text)


def quoted(folder: Path) -> str:
    """Return a path as a shell takes it, in one line."""
    text = str(folder)
    if escaped(text) == text:
        return shlex.quote(text)
    return "$'" + escaped(text.replace("\\", "\\\\").replace("'", "\\'")) + "'"
