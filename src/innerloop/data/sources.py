"""Where text comes from: a file, a folder, a column of records, or a Hugging Face data set, read piece by piece."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

TEXT, RECORDS, COLUMNS = (".txt", ".md", ".text"), (".jsonl", ".ndjson"), (".parquet",)
HUB = "hf:"
"""What the name of a Hugging Face data set begins with: ``hf:NAME``, ``hf:NAME:CONFIGURATION``, and ``:SPLIT``."""
_BLOCK = 1 << 20  # bytes read at once
_PIECE = 1 << 18  # characters encoded at once
_ROWS = 1024
_MARK = "\ufeff"  # in front of a whole file it says how it is encoded, and is no part of the text
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def documents(place: str, column: str = "text") -> Iterator[Iterator[str]]:
    """Yield every document of a source as its pieces; no more than a piece of a file is ever in memory.

    Args:
        place: A text file; a ``.jsonl`` or ``.parquet`` file, whose rows are documents; a folder, of which every such
            file is read in the order of their paths; or ``hf:NAME``, a Hugging Face data set.
        column: Of a record, what holds the text.

    Yields:
        Documents, each an iterator of strings that is to be read before the next document is asked for.

    Raises:
        ValueError: If there is no such place, a file is no UTF-8 text, or a record has no such column.
        RuntimeError: If a package that the source needs is missing.
        OSError: If a file cannot be read.
    """
    if place.startswith(HUB):
        yield from _hub(place.removeprefix(HUB), column)
        return
    path = Path(place)
    if not path.exists():
        raise ValueError(f"data must be a file, a folder or {HUB}NAME; there is no {path}")
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        yield from _saved(path, column)
        return
    for file in _listed(path) if path.is_dir() else [path]:
        yield from _file(file, column)


def has_columns(place: str) -> bool:
    """Whether a source has records, whose columns have names; what is not there may have."""
    path = Path(place)
    if place.startswith(HUB) or not path.exists():
        return True
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return True
    return any(file.suffix.lower() in (*RECORDS, *COLUMNS) for file in (path.rglob("*") if path.is_dir() else [path]))


def size(place: str) -> int | None:
    """Return how many bytes a source's files have, for estimates alone; None for a data set."""
    path = Path(place)
    if place.startswith(HUB) or not path.exists():
        return None
    return sum(file.stat().st_size for file in (_listed(path) if path.is_dir() else [path]))


def cut(blocks: Iterable[str], piece: int = _PIECE) -> Iterator[str]:
    """Yield the same text in pieces that byte pairs encode as they would the whole.

    Byte-level encoding takes words apart first, and no word holds a blank behind a letter or a number: that is where
    pieces end.

    Args:
        blocks: The text, cut anywhere.
        piece: Characters at which a piece may end; it may be longer where there is no such place.

    Yields:
        Pieces, none of them empty.
    """
    held = ""
    for block in blocks:
        held += block
        while len(held) > piece:
            end = _end_of_word(held, piece)
            if end is None and len(held) < 16 * piece:
                break  # a longer piece may have one
            end = end or len(held)
            yield held[:end]
            held = held[end:]
    if held:
        yield held


def _end_of_word(text: str, start: int) -> int | None:
    for place in range(start, len(text)):
        if text[place] in " \n" and text[place - 1].isalnum():
            return place
    return None


def _listed(folder: Path) -> list[Path]:
    known = (*TEXT, *RECORDS, *COLUMNS)
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in known and path.is_file())
    found = [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    if not found:
        raise ValueError(f"data must be a folder that holds files ending in {', '.join(known)}; {folder} holds none")
    return found


def _file(path: Path, column: str) -> Iterator[Iterator[str]]:
    if path.suffix.lower() in COLUMNS:
        yield from _parquet(path, column)
    elif path.suffix.lower() in RECORDS:
        yield from _records(path, column)
    else:
        yield _decoded(path)


def _decoded(path: Path) -> Iterator[str]:
    """Yield the file's text block by block; ValueError where it is none."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        at = 0
        while True:
            block = file.read(_BLOCK)
            waiting = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                byte = at - waiting + error.start
                raise ValueError(f"{path} must be UTF-8 text; byte {byte} is not ({error.reason}). "
                                 "Is it a binary file?") from None  # fmt: skip
            if "\0" in text:
                raise ValueError(f"{path} must be text; it holds a zero byte. Is it a binary file?")
            if at == 0:
                text = text.removeprefix(_MARK)
            if text:
                yield text
            if not block:
                return
            at += len(block)


def _records(path: Path, column: str) -> Iterator[Iterator[str]]:
    number, held = 0, ""
    for block in _decoded(path):
        *lines, held = (held + block).split("\n")
        for line in lines:
            number += 1
            if line.strip():
                yield iter([_field(line, column, f"{path} line {number}")])
    if held.strip():
        yield iter([_field(held, column, f"{path} line {number + 1}")])


def _field(line: str, column: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError:
        raise ValueError(f"{where} must be a JSON object; it is not") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where} must be a JSON object; got {type(record).__name__}")
    return _text(record.get(column), column, where, list(record))


def _parquet(path: Path, column: str) -> Iterator[Iterator[str]]:
    parquet = _library("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:  # pyarrow's own errors are subclasses of this or that
        what = str(error).partition("\n")[0]
        raise ValueError(f"{path} must be a parquet file; it cannot be read: {what}") from None
    with file:
        names = file.schema_arrow.names
        if column not in names:
            raise _absent(str(path), column, names)
        for batch in file.iter_batches(_ROWS, columns=[column]):
            for value in batch.column(0).to_pylist():
                yield iter([_text(value, column, str(path), names)])


def _hub(name: str, column: str) -> Iterator[Iterator[str]]:
    name, _, rest = name.partition(":")
    configuration, _, split = rest.partition(":")
    library = _library("datasets")
    try:
        rows = library.load_dataset(name, configuration or None, split=split or "train", streaming=True)
    except Exception as error:  # no network, no such set, no such split: each has a class of its own
        raise _unloadable(f"{HUB}{name}", error) from None
    yield from _rows(rows, column, f"{HUB}{name}")


def _saved(path: Path, column: str) -> Iterator[Iterator[str]]:
    library = _library("datasets")
    try:
        rows = library.load_from_disk(str(path))
    except Exception as error:  # a folder that merely looks like one
        raise _unloadable(str(path), error) from None
    if isinstance(rows, dict):
        if "train" not in rows:
            raise ValueError(f"{path} must have a split named train; it has {', '.join(rows)}. Name a split's folder")
        rows = rows["train"]
    yield from _rows(rows, column, str(path))


def _rows(rows: Iterable[dict[str, Any]], column: str, where: str) -> Iterator[Iterator[str]]:
    for row in rows:
        yield iter([_text(row.get(column), column, where, list(row))])


def _text(value: object, column: str, where: str, names: list[str]) -> str:
    if column not in names:
        raise _absent(where, column, names)
    if not isinstance(value, str):
        raise ValueError(f"{where} must hold text in its column {column}; got {type(value).__name__}")
    if not value.isascii() and (half := _SURROGATE.search(value)):
        raise ValueError(f"{where} must hold Unicode text in its column {column}; its character {half.start()} is half "
                         f"of a surrogate pair, U+{ord(half[0]):04X}")  # fmt: skip
    return value


def _absent(where: str, column: str, names: list[str]) -> ValueError:
    return ValueError(f"{where} must have a column {column}; it has {', '.join(names) or 'none'}. Name one by --column")


def _unloadable(where: str, error: Exception) -> ValueError:
    what = " ".join(str(error).split())
    return ValueError(f"{where} must be a data set that can be loaded; got {type(error).__name__}: {what}")


def _library(name: str) -> ModuleType:
    import importlib

    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"this source needs the package {package}, which is not installed: pip install 'innerloop[data]'"
        ) from error
