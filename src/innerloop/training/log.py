"""What a run has shown, a line at a time, in files that a resumed run goes on in without a line twice or missing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Log:
    """A file of comma-separated values, written line by line.

    What a checkpoint has seen of it is on the disk before the checkpoint is; what came after is cut off on resuming,
    half lines included, and written again.
    """

    def __init__(self, path: Path, columns: Sequence[str], size: int | None = None) -> None:
        """Open the file for more lines.

        Args:
            path: The file, which is made if it is not there.
            columns: The names in its first line.
            size: Bytes that are to stay; None begins anew.

        Raises:
            OSError: If it cannot be written.
        """
        if size is not None and path.exists() and path.stat().st_size >= size:
            os.truncate(path, size)
        else:
            path.write_text(",".join(columns) + "\n", "utf-8")
        self._file = path.open("ab")

    def write(self, values: Sequence[int | float | str]) -> None:
        """Write a line; OSError if it cannot be written."""
        self._file.write((",".join(str(value) for value in values) + "\n").encode("utf-8"))
        self._file.flush()

    def settle(self) -> int:
        """Put all lines on the disk, and return how many bytes they are."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Board:
    """The same for TensorBoard, if it was asked for."""

    def __init__(self, folder: Path, step: int, *, wanted: bool) -> None:
        """Open a file of events behind ``step``; what others have shown of later steps is hidden.

        Args:
            folder: Where TensorBoard is to look.
            step: Updates taken so far.
            wanted: Whether to write at all.

        Raises:
            RuntimeError: If the package ``tensorboard`` is missing.
        """
        self._writer = _writer()(str(folder), purge_step=step + 1) if wanted else None

    def show(self, step: int, **values: float) -> None:
        """Add a point to some curves."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def settle(self) -> None:
        """Hand all points to the system."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


def check_board() -> None:
    """Raise RuntimeError if the package ``tensorboard`` is missing."""
    _writer()


def _writer() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise RuntimeError(
            "logs for TensorBoard need the package tensorboard, which is not installed: "
            "pip install 'innerloop[tensorboard]'"
        ) from error
    return SummaryWriter
