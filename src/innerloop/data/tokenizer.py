"""Byte-level byte-pair encoding, learned from the text that is to be encoded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

RESERVED = ("<pad>", "<bos>", "<eos>")
"""The first three ids; a document's vocabulary of 1,027 is these and 1,024 learned tokens."""


class Tokenizer:
    """Pieces of text as numbers, the most frequent pairs of bytes merged first.

    The alphabet is the bytes that occur in the training text; a byte outside it is left out when encoding.
    Needs the package ``tokenizers``, the extra ``lm``; RuntimeError where it is missing.
    """

    def __init__(self, text: str, vocabulary: int = 1027) -> None:
        """Learn the merges.

        Args:
            text: What the merges are learned from, raw: neither case nor white space is changed.
            vocabulary: Number of ids in all, the reserved ones included.

        Raises:
            ValueError: If the text is too short to fill the vocabulary.
        """
        library = _library()
        self._pairs = library.Tokenizer(library.models.BPE())
        self._pairs.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._pairs.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=list(RESERVED), show_progress=False)
        self._pairs.train_from_iterator([text], trainer)
        if len(self) != vocabulary:
            raise ValueError(
                f"vocabulary must be what the text can fill; wanted {vocabulary}, got {len(self)} from "
                f"{len(text)} characters. Ask for fewer or give a longer text."
            )

    def __len__(self) -> int:
        """Return the number of ids, the reserved ones included."""
        return self._pairs.get_vocab_size()

    def encode(self, text: str) -> Tensor:
        """Return the ids of ``text``, int64 ``[T]``."""
        return torch.tensor(self._pairs.encode(text).ids, dtype=torch.int64)

    def decode(self, ids: Tensor | Iterable[int]) -> str:
        """Return the text of ``ids``; reserved ids are left out, bytes that are no character become U+FFFD."""
        return self._pairs.decode([int(token) for token in ids])


def _library() -> ModuleType:
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "byte-pair encoding needs the package tokenizers, which is not installed: pip install 'innerloop[lm]'"
        ) from error
    return tokenizers
