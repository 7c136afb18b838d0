"""Texts to train on, and how they become windows of tokens."""

from innerloop.data.time_machine import Text, time_machine
from innerloop.data.tokenizer import Tokenizer
from innerloop.data.topics import pydoc_topics
from innerloop.data.windows import Windows, windows

__all__ = ["Text", "Tokenizer", "Windows", "pydoc_topics", "time_machine", "windows"]
