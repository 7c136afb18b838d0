"""Text as numbers and back: one number a byte, or byte pairs learned from the text that is to be encoded."""

from __future__ import annotations

import codecs
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from innerloop import files

if TYPE_CHECKING:
    from types import ModuleType

RESERVED = ("<pad>", "<bos>", "<eos>")
"""The first three ids; a document's vocabulary of 1,027 is these and 1,024 learned tokens."""
SEPARATOR = RESERVED.index("<eos>")
"""The id that stands between two documents."""


class Tokenizer(ABC):
    """What ids mean. The ids below ``len(RESERVED)`` mean no bytes, every other id means some.

    A text is never changed: what ``encode`` makes of it, ``decode`` makes the same text again.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of ids, the reserved ones included."""

    @abstractmethod
    def encode(self, text: str) -> Tensor:
        """Return the ids of ``text``, int64 ``[T]``; a reserved name in it is text like any other."""

    @property
    @abstractmethod
    def pieces(self) -> list[bytes]:
        """The bytes of every id, empty for those that mean none."""

    @abstractmethod
    def as_json(self) -> str:
        """Return it in the form of Hugging Face's ``tokenizer.json``, which their library reads too."""

    @cached_property
    def byte_counts(self) -> np.ndarray:
        """How many bytes each id stands for, int64 ``[len(self)]``."""
        return np.array([len(piece) for piece in self.pieces])

    @cached_property
    def character_counts(self) -> np.ndarray:
        """How many characters begin in each id, int64 ``[len(self)]``; over a text they sum up to its length."""
        return np.array([sum(byte & 0xC0 != 0x80 for byte in piece) for piece in self.pieces])

    def decode(self, ids: Tensor | Iterable[int]) -> str:
        """Return the text of ``ids``; reserved ids are left out, bytes that are no character become U+FFFD."""
        return b"".join(self.pieces[int(token)] for token in ids).decode("utf-8", "replace")

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield the text of ``ids`` as they come, each character as soon as its last byte is there.

        Args:
            ids: Tokens, read one by one.

        Yields:
            Whole characters, never an empty string; joined they are ``decode(ids)``.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in ids:
            if text := decoder.decode(self.pieces[int(token)]):
                yield text
        if text := decoder.decode(b"", final=True):
            yield text

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file that :func:`load_tokenizer` reads; OSError if it cannot be written."""
        files.write_text(path, self.as_json())


class ByteTokenizer(Tokenizer):
    """One id a byte, behind the reserved ones: nothing to learn, and every text can be encoded.

    Example:
        >>> from innerloop.data import ByteTokenizer
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("aé").tolist(), tokenizer.decode([100, 2, 198, 172])
        ([100, 198, 172], 'aé')
    """

    def __len__(self) -> int:
        """Return 259."""
        return len(RESERVED) + 256

    @cached_property
    def pieces(self) -> list[bytes]:
        """The bytes of every id, empty for those that mean none."""
        return [b""] * len(RESERVED) + [bytes([byte]) for byte in range(256)]

    def encode(self, text: str) -> Tensor:
        """Return the ids of ``text``, int64 ``[T]``."""
        return torch.from_numpy(np.frombuffer(_encoded(text), np.uint8).astype(np.int64) + len(RESERVED))

    def as_json(self) -> str:
        """Return it as byte pairs of which none is merged."""
        letters = {byte: letter for letter, byte in _letters().items()}
        vocabulary = {letters[byte]: len(RESERVED) + byte for byte in range(256)}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        return json.dumps({
            "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
            "added_tokens": [{"id": id_, "content": name, **plain} for id_, name in enumerate(RESERVED)],
            "pre_tokenizer": level, "decoder": level,
            "model": {"type": "BPE", "vocab": dict(zip(RESERVED, range(3), strict=True)) | vocabulary, "merges": []},
        }, indent=1)  # fmt: skip


class PairTokenizer(Tokenizer):
    """Byte-level byte-pair encoding, the most frequent pairs merged first.

    Needs the package ``tokenizers``, the extra ``lm``; RuntimeError where it is missing.
    """

    def __init__(self, pairs: Any) -> None:  # ruff: ignore[any-type] - a class of a package that may be missing
        """Wrap a ``tokenizers.Tokenizer`` of bytes whose first ids are the reserved ones; see :meth:`learn`."""
        self._pairs = pairs
        pairs.encode_special_tokens = True  # a text may speak of <eos> without ending there

    @classmethod
    def learn(
        cls, texts: Iterable[str], vocabulary: int = 1027, *, alphabet: Literal["every", "seen"] = "every"
    ) -> PairTokenizer:
        """Learn the merges.

        Args:
            texts: What they are learned from, raw: neither case nor white space is changed. Read once, one by one.
            vocabulary: Number of ids in all, the reserved ones included.
            alphabet: Whether ``every`` byte has an id, or those alone that were ``seen``, which leaves more ids to
                merges, but encodes a text without its other bytes.

        Returns:
            The tokenizer.

        Raises:
            ValueError: If the text is too short to fill the vocabulary, or the vocabulary too small for the alphabet.
            RuntimeError: If the package ``tokenizers`` is missing.
        """
        library = _library()
        smallest = len(RESERVED) + 256
        if alphabet == "every" and vocabulary < smallest:
            raise ValueError(f"vocabulary must be at least {smallest}, every byte and the reserved; got {vocabulary}")
        pairs = library.Tokenizer(library.models.BPE())
        pairs.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        pairs.decoder = library.decoders.ByteLevel()
        first = list(_letters()) if alphabet == "every" else []
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=list(RESERVED), show_progress=False, initial_alphabet=first
        )
        pairs.train_from_iterator(texts, trainer)
        found = pairs.get_vocab_size()
        if found != vocabulary:
            raise ValueError(f"vocabulary must be what the text can fill; wanted {vocabulary}, got {found}. "
                             "Ask for fewer or give a longer text.")  # fmt: skip
        return cls(pairs)

    def __len__(self) -> int:
        """Return the number of ids, the reserved ones included."""
        return self._pairs.get_vocab_size()

    @cached_property
    def pieces(self) -> list[bytes]:
        """The bytes of every id, empty for those that mean none."""
        byte = _letters()
        words = [self._pairs.id_to_token(token) for token in range(len(RESERVED), len(self))]
        return [b""] * len(RESERVED) + [bytes(byte[letter] for letter in word) for word in words]

    def encode(self, text: str) -> Tensor:
        """Return the ids of ``text``, int64 ``[T]``."""
        _encoded(text)  # the package would say nothing of use
        return torch.tensor(self._pairs.encode_batch_fast([text])[0].ids, dtype=torch.int64)

    def as_json(self) -> str:
        """Return what the package itself writes."""
        return self._pairs.to_str()


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Read what :meth:`Tokenizer.save` wrote.

    Args:
        path: The file, ``tokenizer.json``.

    Returns:
        The tokenizer.

    Raises:
        ValueError: If the file is damaged, or is a tokenizer of another kind.
        RuntimeError: If it needs the package ``tokenizers``, which is missing.
        OSError: If there is no such file.
    """
    content = Path(path).read_bytes()
    try:
        text = content.decode("utf-8")
        stored = json.loads(text)
        model = stored["model"]
        vocabulary, merges = model["vocab"], model["merges"]
        reserved = tuple(sorted(vocabulary, key=vocabulary.__getitem__)[: len(RESERVED)])
        letters = {letter for word in vocabulary if word not in RESERVED for letter in word}
        known = model["type"] == "BPE" and reserved == RESERVED and letters <= set(_letters())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} must be a tokenizer's file; it cannot be read") from None
    if not known:
        raise ValueError(f"{path} must be a tokenizer that innerloop wrote; it is one of another kind")
    if not merges and len(vocabulary) == len(RESERVED) + 256:
        return ByteTokenizer()
    try:
        return PairTokenizer(_library().Tokenizer.from_str(text))
    except RuntimeError:
        raise
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"{path} must be a tokenizer's file; it cannot be read: {error}") from None


def _encoded(text: str) -> bytes:
    """Return the text's bytes; ValueError if it holds half of a surrogate pair, which no bytes of UTF-8 mean."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"text must be Unicode; its character {error.start} is half of a surrogate pair, "
                         f"U+{ord(text[error.start]):04X}") from None  # fmt: skip


def _letters() -> dict[str, int]:
    """Return the byte behind each letter of the byte-level alphabet: printable ones stand for themselves."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in sorted(printable)} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _library() -> ModuleType:
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "byte-pair encoding needs the package tokenizers, which is not installed: pip install 'innerloop[lm]'"
        ) from error
    return tokenizers
