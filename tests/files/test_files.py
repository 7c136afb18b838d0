"""A file or a folder is there whole or not at all."""

import errno
import os
import resource
import signal
import subprocess
import sys

import pytest

from innerloop import files


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_made_and_replaced(tmp_path):
    path = tmp_path / "note"
    files.write_text(path, "one ü\n")
    assert path.read_bytes() == "one ü\n".encode()
    files.write_bytes(path, b"two")
    assert path.read_bytes() == b"two"
    assert names(tmp_path) == ["note"]


def test_the_old_file_is_seen_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "note"
    path.write_text("old")
    with files.whole(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
        assert partial.parent == tmp_path
    assert path.read_text() == "new"


def test_a_block_that_raises_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "note"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), files.whole(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert (path.read_text(), names(tmp_path)) == ("old", ["note"])


def test_a_name_that_cannot_be_given_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "note"
    path.write_text("old")

    def refuse(source, target):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError):
        files.write_text(path, "new")
    assert (path.read_text(), names(tmp_path)) == ("old", ["note"])


def test_a_folder_is_there_once_all_is_in_it(tmp_path):
    path = tmp_path / "made"
    with files.new_folder(path) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "a").write_text("a")
        assert not path.exists()
    assert (path / "inner" / "a").read_text() == "a"
    assert names(tmp_path) == ["made"]


def test_a_folder_that_fails_is_removed_and_one_that_exists_refused(tmp_path):
    with pytest.raises(ZeroDivisionError), files.new_folder(tmp_path / "made") as partial:
        (partial / "a").write_text("a")
        raise ZeroDivisionError
    assert names(tmp_path) == []
    (tmp_path / "made").mkdir()
    with pytest.raises(FileExistsError, match="must not exist yet"), files.new_folder(tmp_path / "made"):
        pass
    assert names(tmp_path) == ["made"]


def test_a_folder_that_is_there_is_filled_in_its_place_and_emptied_again_by_a_failure(tmp_path, monkeypatch):
    path = tmp_path / "made"
    path.mkdir(mode=0o700)
    before = path.stat()
    monkeypatch.chdir(path)
    with pytest.raises(ZeroDivisionError), files.filled_folder(".", ["b", "a"]) as partial:
        (partial / "a").write_text("a")
        raise ZeroDivisionError
    assert names(path) == []
    with files.filled_folder(".", ["b", "a"]) as partial:
        (partial / "a").write_text("a")
        (partial / "b").mkdir()
        assert names(path) == [partial.name]
    assert names(path) == ["a", "b"]
    after = path.stat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    with pytest.raises(FileExistsError, match="must be empty; it holds"), files.filled_folder(path, ["b", "a"]):
        pass
    assert names(path) == ["a", "b"]


def test_what_was_killed_between_the_moves_of_a_filling_is_cleared_away_and_nothing_else(tmp_path):
    path, left = tmp_path / "made", ".made.0123456789abcdef.partial"
    (path / left).mkdir(parents=True)
    (path / left / "a").write_text("old")
    (path / "b").mkdir()
    with files.filled_folder(path, ["b", "a"]) as partial:
        assert names(path) == [partial.name] != [left]
        (partial / "a").write_text("a")
        (partial / "b").mkdir()
    assert names(path) == ["a", "b"]
    (path / "a").unlink()  # without the leftover, b is somebody's own
    for other in ("mine", left):
        (path / other).mkdir()
        with pytest.raises(FileExistsError), files.filled_folder(path, ["b", "a"]):
            pass
        assert other in names(path)


def test_folders_above_stay_only_if_all_goes_well(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(ZeroDivisionError), files.folders_above(tmp_path / "a" / "b" / "c" / "d"):
        assert (tmp_path / "a" / "b" / "c").is_dir()
        raise ZeroDivisionError
    assert names(tmp_path / "a") == []
    with files.folders_above(tmp_path / "a" / "b" / "c"):
        pass
    assert names(tmp_path / "a") == ["b"]


def test_a_folder_above_that_is_missing_is_said(tmp_path):
    for act in (files.whole, files.new_folder):
        with pytest.raises(FileNotFoundError, match=r"the folder of .*x must exist"), act(tmp_path / "nowhere" / "x"):
            pass


def test_the_permissions_are_those_of_any_file_and_a_link_stays_one(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    before = os.umask(0o027)
    try:
        files.write_text(tmp_path / "link", "x")
        with files.new_folder(tmp_path / "made"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o750


def test_all_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    done = []
    fsync, replace, rename = os.fsync, os.replace, os.rename

    def synced(handle):
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("renamed"), replace(a, b)))
    monkeypatch.setattr(os, "rename", lambda a, b: (done.append("renamed"), rename(a, b)))
    files.write_text(tmp_path / "note", "x")
    assert done[0].startswith(".note.")
    assert done[1:] == ["renamed", tmp_path.name]
    done.clear()
    with files.new_folder(tmp_path / "made") as partial:
        (partial / "a").write_text("a")
    assert done == ["a", partial.name, "renamed", tmp_path.name]


KILLED = """
import os, signal
from innerloop import files
setattr(os, {where!r}, lambda *words: os.kill(os.getpid(), signal.SIGKILL))
with files.{act}({path!r}) as partial:
    (partial / "a" if partial.is_dir() else partial).write_text("new")
"""


@pytest.mark.parametrize("act", ["whole", "new_folder"])
@pytest.mark.parametrize("where", ["fsync", "rename"])
def test_a_writer_that_is_killed_leaves_a_leftover_alone(act, where, tmp_path):
    path = tmp_path / "x"
    if act == "whole":
        path.write_text("old")
        where = where.replace("rename", "replace")
    program = KILLED.format(where=where, act=act, path=str(path))
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    kept = ["x"] if act == "whole" else []
    leftover, *rest = names(tmp_path)
    assert leftover.startswith(".x.") and rest == kept
    (tmp_path / ".mine").write_text("not a leftover")
    files.remove_leftovers(tmp_path)
    assert names(tmp_path) == [".mine", *kept]
    assert not kept or path.read_text() == "old"


def test_leftovers_of_one_name_are_not_those_of_a_longer_one(tmp_path):
    for name in ("exp", "exp.2"):
        (tmp_path / f".{name}.0123456789abcdef.partial").mkdir()
    files.remove_leftovers(tmp_path, "exp")
    assert names(tmp_path) == [".exp.2.0123456789abcdef.partial"]
    files.remove_leftovers(tmp_path)
    assert names(tmp_path) == []


@pytest.mark.skipif(os.name != "posix", reason="needs a limit on the size of a file")
@pytest.mark.parametrize("act", ["text", "state"])
def test_a_disk_without_room_is_the_systems_own_error(act, tmp_path):
    import torch

    from innerloop import states

    path = tmp_path / "x"
    path.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError) as caught:
            if act == "text":
                files.write_text(path, "x" * 10_000)
            else:
                states.save(path, "delta_rule", torch.zeros(1, 1, 64, 64))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(caught.value)
    assert caught.value.errno == errno.EFBIG or "File too large" in str(caught.value)
    assert (path.read_text(), names(tmp_path)) == ("old", ["x"])
