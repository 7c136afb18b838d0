"""Texts to train on, and how they become windows of tokens."""

from innerloop.data.order import shuffled
from innerloop.data.sources import cut, documents
from innerloop.data.time_machine import Text, time_machine
from innerloop.data.tokenizer import SEPARATOR, ByteTokenizer, PairTokenizer, Tokenizer, load_tokenizer
from innerloop.data.tokens import Tokens, encoded, fingerprint, texts, write_tokens
from innerloop.data.topics import pydoc_topics
from innerloop.data.windows import Windows, windows

__all__ = [
    "SEPARATOR",
    "ByteTokenizer",
    "PairTokenizer",
    "Text",
    "Tokenizer",
    "Tokens",
    "Windows",
    "cut",
    "documents",
    "encoded",
    "fingerprint",
    "load_tokenizer",
    "pydoc_topics",
    "shuffled",
    "texts",
    "time_machine",
    "windows",
    "write_tokens",
]
