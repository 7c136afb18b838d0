"""A text's tokens in one file, which is read as if it were memory and may be larger than it."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from innerloop import files
from innerloop.data.order import shuffled
from innerloop.data.sources import cut, documents, size
from innerloop.data.tokenizer import SEPARATOR, Tokenizer

VERSION = 1
"""Of the folder that :func:`write_tokens` makes; :meth:`Tokens.open` reads no other."""
_FORMAT = "innerloop tokens"
_NUMBERS, _FACTS = "tokens.bin", "tokens.json"
_KINDS = ("uint16", "uint32")


@dataclass(frozen=True)
class Tokens:
    """The tokens of a training text, and behind them those of a text to validate on."""

    folder: Path
    count: int
    """Of both."""
    split: int
    """Where validation begins."""
    kind: str
    """Of the file's numbers, such as ``uint16``."""
    source: str
    documents: int

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Tokens:
        """Open what :func:`write_tokens` made; ValueError if it is something else, OSError if it is not there."""
        folder = Path(folder)
        facts = folder / _FACTS
        try:
            stored = json.loads(facts.read_text("utf-8"))
            if stored.pop("format") != _FORMAT:
                raise ValueError
            version = stored.pop("version")
            stored.pop("tokenizer")
            tokens = cls(folder=folder, **stored) if version == VERSION else None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{facts} must be written by innerloop; it is damaged or something else") from None
        if tokens is None:
            raise ValueError(f"{facts} must have version {VERSION}; got {version}. Make the tokens anew")
        whole = type(tokens.count) is int and type(tokens.split) is int
        if tokens.kind not in _KINDS or not whole or not 0 <= tokens.split <= tokens.count:
            raise ValueError(f"{facts} must say how many tokens there are and of what kind; it is damaged")
        wanted = tokens.count * np.dtype(tokens.kind).itemsize
        if (folder / _NUMBERS).stat().st_size != wanted:
            raise ValueError(f"{folder / _NUMBERS} must have {wanted} bytes; it has been changed. Make the tokens anew")
        return tokens

    @cached_property
    def numbers(self) -> np.ndarray:
        """All ids, ``[count]``, a map of the file."""
        return np.memmap(self.folder / _NUMBERS, self.kind, "r", shape=(self.count,))

    def piece(self, start: int, end: int) -> Tensor:
        """Return a copy of the ids from ``start`` to below ``end``, int64 ``[T]``."""
        return torch.from_numpy(self.numbers[start:end].astype(np.int64))

    def training_windows(self, length: int, stride: int) -> int:
        """Return how many windows of ``length`` inputs, one target further, start ``stride`` apart before the split."""
        return max(0, (self.split - length - 1) // stride + 1)

    def batch(self, number: int, rows: int, length: int, stride: int, seed: int) -> Tensor:
        """Return a batch of training windows; it depends on nothing but its number and the seed.

        Every window is seen once before one is seen again; each such round has an order of its own.

        Args:
            number: From 0.
            rows: Windows in a batch.
            length: Inputs in a window.
            stride: From one window's start to the next one's.
            seed: Names the orders.

        Returns:
            ``[rows, length + 1]``, int64.
        """
        count = self.training_windows(length, stride)
        places = np.arange(number * rows, (number + 1) * rows)
        chosen = np.empty(rows, np.int64)
        for round_ in np.unique(places // count):
            mine = places // count == round_
            chosen[mine] = shuffled(places[mine] % count, count, (seed << 20) + int(round_))
        found = np.stack([self.numbers[start : start + length + 1] for start in chosen * stride])
        return torch.from_numpy(found.astype(np.int64))

    def validation(self, length: int, most: int) -> Tensor:
        """Return at most ``most`` windows ``[N, length + 1]`` of the text to validate on, spread over it evenly."""
        count = (self.count - self.split - 1) // length
        if count < 1:
            return torch.empty(0, length + 1, dtype=torch.int64)
        chosen = np.unique(np.linspace(0, count - 1, min(most, count)).astype(np.int64))
        starts = self.split + chosen * length
        return torch.from_numpy(np.stack([self.numbers[x : x + length + 1] for x in starts]).astype(np.int64))


def write_tokens(
    folder: str | os.PathLike[str],
    place: str,
    tokenizer: Tokenizer,
    *,
    column: str = "text",
    validation: str | None = None,
    hold_out: float = 0.1,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Tokens:
    """Encode a text into a folder of its own, piece by piece, with a separator between documents.

    Args:
        folder: To be made.
        place: The text; see :func:`innerloop.data.documents`.
        tokenizer: What encodes it.
        column: Of records, what holds the text.
        validation: The text to validate on; the end of ``place`` if None.
        hold_out: How much of ``place`` that end is.
        progress: Called with the fraction done.

    Returns:
        The tokens, in a file that is there whole or not at all.

    Raises:
        ValueError: If a text is missing, empty or no text.
        RuntimeError: If a package that a source needs is missing.
        OSError: If a file cannot be read or written.
    """
    kind = np.dtype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32)
    total = size(place)
    with files.new_folder(folder) as partial:
        with open(partial / _NUMBERS, "wb") as file:
            count = read = 0
            parts = 1
            for ids in _joined(place, column, tokenizer):
                file.write(ids.numpy().astype(kind).tobytes())
                count += len(ids)
                parts += int((ids == SEPARATOR).sum())
                read += int(tokenizer.byte_counts[ids].sum())
                progress(min(1.0, read / total) if total else 0.0)
            split = count - int(count * hold_out)
            if validation is not None:
                split = count
                for ids in _joined(validation, column, tokenizer):
                    file.write(ids.numpy().astype(kind).tobytes())
                    count += len(ids)
        facts = {"count": count, "split": split, "kind": kind.name, "source": place, "documents": parts}
        facts |= {"format": _FORMAT, "version": VERSION, "tokenizer": fingerprint(tokenizer)}
        (partial / _FACTS).write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
    return Tokens.open(folder)


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return a hash by which two tokenizers can be told apart."""
    return hashlib.sha256(tokenizer.as_json().encode("utf-8")).hexdigest()


def texts(place: str, column: str = "text") -> Iterator[str]:
    """Yield a source's text in pieces, as byte pairs are learned from it."""
    for document in documents(place, column):
        yield from cut(document)


def encoded(place: str, column: str, tokenizer: Tokenizer) -> Iterator[Iterator[Tensor]]:
    """Yield the ids of each document that has text, piece by piece.

    Args:
        place: The source; see :func:`innerloop.data.documents`.
        column: Of records, what holds the text.
        tokenizer: What encodes it.

    Yields:
        Documents, each an iterator of int64 ``[T]``, to be read before the next is asked for.

    Raises:
        ValueError: If the source is missing, empty or no text.
        RuntimeError: If a package that the source needs is missing.
        OSError: If a file cannot be read.
    """
    empty = True
    for document in documents(place, column):
        pieces = cut(document)
        first = next(pieces, None)
        if first is not None:
            empty = False
            yield (tokenizer.encode(piece) for piece in itertools.chain([first], pieces))
    if empty:
        raise ValueError(f"data must hold text; {place} is empty")


def _joined(place: str, column: str, tokenizer: Tokenizer) -> Iterator[Tensor]:
    """Yield all ids, with the separator between documents."""
    for number, document in enumerate(encoded(place, column, tokenizer)):
        if number:
            yield torch.tensor([SEPARATOR])
        yield from document
