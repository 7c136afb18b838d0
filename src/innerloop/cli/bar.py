"""A bar on a terminal, and plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm


def terminal_bar(total: float, stream: TextIO, shape: str | None = None) -> tqdm[NoReturn] | None:
    """Return a bar, or None where nobody would see it or the package ``tqdm`` is missing.

    Args:
        total: What makes it full.
        stream: Where to draw.
        shape: tqdm's ``bar_format``.

    Returns:
        The bar.
    """
    if not stream.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    shape = shape or "{desc:<40} {bar} {percentage:3.0f}%{postfix}"
    return tqdm(total=total, file=stream, bar_format=shape, dynamic_ncols=True, leave=False)


class Bar:
    """Work in equal parts: a bar with words behind it, or a line now and then."""

    def __init__(self, total: float, title: str, stream: TextIO | None = None) -> None:
        """Begin at nothing."""
        self._stream = stream or sys.stderr
        self._bar = terminal_bar(total, self._stream, "{desc} {bar} {percentage:3.0f}%{postfix}")
        if self._bar is not None:
            self._bar.set_description_str(title)

    def reach(self, done: float, words: str = "") -> None:
        """So much is done of the total."""
        if self._bar is not None:
            self._bar.set_postfix_str(words, refresh=False)
            self._bar.update(done - self._bar.n)

    def say(self, line: str, *, always: bool = True) -> None:
        """Print a line, if not ``always`` only where there is no bar."""
        if self._bar is not None:
            if always:
                self._bar.write(line, file=self._stream)
        else:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the terminal clean."""
        if self._bar is not None:
            self._bar.close()
