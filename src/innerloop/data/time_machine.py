"""Find The Time Machine, check that it is the one the documents trained on, or say why it cannot be had."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from innerloop.data.topics import pydoc_topics
from innerloop.files import write_bytes

FILE = "timemachine.txt"
SHA1 = "090b5e7e70c295757f55df93cb0a180b9691891a"
URL = f"https://d2l-data.s3-accelerate.amazonaws.com/{FILE}"
"""The data hub from which D2L itself takes the text."""
VARIABLE = "INNERLOOP_DATA"
_TIMEOUT = 5.0  # seconds: a report must not wait long for a network that is not there
_LARGEST = 1 << 20  # bytes: six times the file; whatever is longer is not the file


@dataclass(frozen=True)
class Text:
    """A text to train on, and where it came from."""

    content: str
    name: str
    """``"The Time Machine"``, or ``"pydoc topics"`` where it could not be had."""
    source: str
    """The file or address that was read."""
    reason: str = ""
    """Why another text stands in; empty for The Time Machine."""

    @property
    def is_time_machine(self) -> bool:
        """Whether numbers measured on this text may be held against the document's."""
        return not self.reason


def time_machine(path: str | os.PathLike[str] | None = None) -> Text:
    """Return The Time Machine, checked by its SHA-1, or the pydoc topics with the reason.

    It is looked for at ``path``, at ``$INNERLOOP_DATA`` (each a file, or a folder that holds ``timemachine.txt``)
    and in the user's cache, then downloaded into that cache.

    Args:
        path: File or folder to look at first; it must exist, though a folder need not hold the text.

    Returns:
        The text, its name and its source; ``reason`` is empty unless another text stands in.

    Raises:
        ValueError: If ``path`` does not exist, or a file was found that is not the text the documents used.
    """
    if path is not None and not Path(path).exists():
        raise ValueError(f"data must be a file or folder that exists; got {path}. Leave it out to use the cache.")
    for place in _places(path):
        file = place / FILE if place.is_dir() else place
        if file.is_file():
            return Text(_checked(file.read_bytes(), str(file)), "The Time Machine", str(file))
    return _downloaded()


def cache_folder() -> Path:
    """Return the user's cache for this library, by the XDG convention; it need not exist."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The convention asks that a relative path there be ignored.
    return (named if named.is_absolute() else Path.home() / ".cache") / "innerloop"


def _places(path: str | os.PathLike[str] | None) -> list[Path]:
    named = [path, os.environ.get(VARIABLE), cache_folder()]
    return [Path(place).expanduser() for place in named if place]


def _checked(content: bytes, source: str) -> str:
    got = hashlib.sha1(content, usedforsecurity=False).hexdigest()
    if got != SHA1:
        raise ValueError(f"{source} must be The Time Machine with SHA-1 {SHA1}; got {got}. Remove it or name another.")
    return content.decode("utf-8")


def _downloaded() -> Text:
    try:
        with urllib.request.urlopen(URL, timeout=_TIMEOUT) as answer:
            content = answer.read(_LARGEST)
        text = _checked(content, URL)
    # OSError covers no network, no such host, refused, timed out and every HTTP status that is not a success.
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = f"no {FILE} at the given path, in ${VARIABLE} or in the cache, and the download failed: {error}"
        return Text(pydoc_topics(), "pydoc topics", "pydoc_data.topics", reason)
    # A cache that cannot be written costs the next run a download, not this one its text.
    with contextlib.suppress(OSError):
        cache_folder().mkdir(parents=True, exist_ok=True)
        write_bytes(cache_folder() / FILE, content)
    return Text(text, "The Time Machine", URL)
