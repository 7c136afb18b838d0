"""Files and folders that are there whole or not at all, whatever interrupts their writing."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["filled_folder", "folders_above", "new_folder", "remove_leftovers", "whole", "write_bytes", "write_text"]

_SUFFIX = ".partial"
_TEMPORARY = re.compile(rf"\.(?P<name>.+)\.[0-9a-f]{{16}}{re.escape(_SUFFIX)}")


@contextmanager
def whole(path: str | os.PathLike[str]) -> Generator[Path, None, None]:
    """Lend a temporary file beside ``path``, and give it that name once it is written and on the disk.

    A reader sees the old file or the new one, never half of it, also after a power cut. The file has the permissions
    of any other, and a link keeps pointing where it did.

    Args:
        path: The file to make or to replace.

    Yields:
        The empty temporary file, to be written by its name; it is removed if the block raises.

    Raises:
        FileNotFoundError: If the folder does not exist.
        OSError: If the file cannot be written.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from innerloop import files
        >>> path = Path(tempfile.mkdtemp(), "note")
        >>> with files.whole(path) as partial:
        ...     _ = partial.write_text("all of it")
        >>> path.read_text()
        'all of it'
    """
    path = Path(os.path.realpath(path))
    partial = _beside(path)
    try:
        partial.touch(exist_ok=False)  # some writers make files that nobody else may read
        yield partial
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _settle(path.parent)


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Generator[Path, None, None]:
    """Lend a temporary folder beside ``path``, and give it that name once all that was put in is on the disk.

    Args:
        path: The folder to make; nothing may have that name, for a folder that holds files cannot be replaced at once.

    Yields:
        The empty temporary folder; it is removed with what it holds if the block raises.

    Raises:
        FileExistsError: If there is something of that name.
        FileNotFoundError: If the folder above does not exist.
        OSError: If a file cannot be written.
    """
    path = Path(os.path.realpath(path))
    if path.exists():
        raise FileExistsError(f"{path} must not exist yet; remove it or name another")
    partial = _beside(path)
    try:
        partial.mkdir()
        yield partial
        _settle_all(partial)
        os.rename(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _settle(path.parent)


@contextmanager
def filled_folder(path: str | os.PathLike[str], names: Sequence[str]) -> Generator[Path, None, None]:
    """Lend a temporary folder inside ``path``, and move what was put in out of it once it is on the disk.

    The folder itself stays what it is: one that a process stands in, one with permissions of its own, a mount point.
    What was killed between the moves lacks the last of ``names``, and the next filling begins anew.

    Args:
        path: A folder that is there and empty, but for what such a killed process has left.
        names: What is put in, in the order of the moves: whoever sees the last one sees all.

    Yields:
        The empty temporary folder; it is removed, with what has been moved, if the block raises.

    Raises:
        FileExistsError: If the folder holds something else.
        OSError: If a file cannot be written.
    """
    path = Path(os.path.realpath(path))
    if unfilled(path, names):
        _empty(path, names)
    else:
        raise FileExistsError(f"{path} must be empty; it holds something")
    partial = path / _beside(path).name
    try:
        partial.mkdir()
        yield partial
        _settle_all(partial)
        for name in names:
            _settle(path)  # what was moved before
            os.rename(partial / name, path / name)
        partial.rmdir()
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        _empty(path, names)
        raise
    _settle(path)


def unfilled(path: Path, names: Sequence[str]) -> bool:
    """Whether a folder is empty, but for what a killed :func:`filled_folder` has left."""
    found = {entry.name for entry in path.iterdir()}
    leftovers = {name for name in found if (match := _TEMPORARY.fullmatch(name)) and match["name"] == path.name}
    return found <= leftovers | set(names[:-1]) if leftovers else not found


@contextmanager
def folders_above(path: str | os.PathLike[str]) -> Generator[None, None, None]:
    """Make the folders above ``path`` that are missing; if the block raises, none of them stays.

    Args:
        path: What is to be made inside the block; it need not be.

    Raises:
        OSError: If one cannot be made.
    """
    above = Path(os.path.realpath(path)).parent
    made = [folder for folder in (above, *above.parents) if not folder.exists()]
    try:
        above.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in made:
            with suppress(OSError):  # somebody else has put something there since
                folder.rmdir()
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` as UTF-8; see :func:`whole`.

    Args:
        path: The file to make or to replace.
        text: All that it is to hold.

    Raises:
        FileNotFoundError: If the folder does not exist.
        OSError: If the file cannot be written.
    """
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write ``content``; see :func:`whole`.

    Args:
        path: The file to make or to replace.
        content: All that it is to hold.

    Raises:
        FileNotFoundError: If the folder does not exist.
        OSError: If the file cannot be written.
    """
    with whole(path) as partial:
        partial.write_bytes(content)


def remove_leftovers(folder: str | os.PathLike[str], name: str = "*") -> None:
    """Remove what writers that were killed have left in ``folder``; nobody may be writing there.

    Args:
        folder: Where to look; folders in it are left alone.
        name: Of what was to be written; anything.
    """
    for path in Path(folder).glob(f".*{_SUFFIX}"):
        found = _TEMPORARY.fullmatch(path.name)
        if found is None or name not in ("*", found["name"]):  # somebody else's: of exp.2, where exp is meant
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder of {path} must exist")
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}{_SUFFIX}")


def _empty(path: Path, names: Sequence[str]) -> None:
    """Remove what a filling has put into a folder."""
    remove_leftovers(path, path.name)
    for name in names:
        if (path / name).is_dir():
            shutil.rmtree(path / name, ignore_errors=True)
        else:
            (path / name).unlink(missing_ok=True)


def _settle_all(folder: Path) -> None:
    """Put a folder with all that it holds on the disk."""
    for place, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(place, name), "rb+") as file:
                os.fsync(file.fileno())
        _settle(Path(place))


def _settle(folder: Path) -> None:
    """Put the names in a folder on the disk, where the system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass  # some file systems cannot, and the name is right all the same
    finally:
        os.close(handle)
