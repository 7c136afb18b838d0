"""Where The Time Machine is looked for, and what happens when it is not there."""

import hashlib
import io
import os
import urllib.error
from pathlib import Path

import pytest

from innerloop.data import Text, pydoc_topics, time_machine

MODULE = "innerloop.data.time_machine"
STAND_IN = b"The stand-in: a text whose hash the fixture below makes the wanted one.\n"


@pytest.fixture
def module(monkeypatch, tmp_path):
    """The module, with the stand-in's hash wanted, an empty cache, no variable, and no network."""
    import importlib

    found = importlib.import_module(MODULE)
    monkeypatch.setattr(found, "SHA1", hashlib.sha1(STAND_IN, usedforsecurity=False).hexdigest())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("INNERLOOP_DATA", raising=False)
    monkeypatch.setattr(found.urllib.request, "urlopen", refuse)
    return found


def refuse(url, timeout):
    raise urllib.error.URLError("no network")


def serve(content, calls):
    def answer(url, timeout):
        calls.append((url, timeout))
        return io.BytesIO(content)

    return answer


def written(file: Path, content: bytes = STAND_IN) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def test_a_file_of_any_name_is_read(module, tmp_path):
    file = written(tmp_path / "book.txt")
    assert time_machine(file) == Text(STAND_IN.decode(), "The Time Machine", str(file))


def test_a_folder_is_searched_for_the_file(module, tmp_path):
    file = written(tmp_path / "texts" / "timemachine.txt")
    assert time_machine(tmp_path / "texts").source == str(file)


@pytest.mark.parametrize("as_folder", [False, True])
def test_the_variable_names_a_file_or_a_folder(module, tmp_path, monkeypatch, as_folder):
    file = written(tmp_path / "texts" / "timemachine.txt")
    monkeypatch.setenv("INNERLOOP_DATA", str(file.parent if as_folder else file))
    assert time_machine().source == str(file)


def test_a_given_path_comes_before_the_variable_and_the_variable_before_the_cache(module, tmp_path, monkeypatch):
    given, named = written(tmp_path / "given.txt"), written(tmp_path / "named.txt")
    cached = written(tmp_path / "cache" / "innerloop" / "timemachine.txt")
    assert time_machine().source == str(cached)
    monkeypatch.setenv("INNERLOOP_DATA", str(named))
    assert time_machine().source == str(named)
    assert time_machine(given).source == str(given)


def test_a_variable_that_points_nowhere_is_passed_over(module, tmp_path, monkeypatch):
    cached = written(tmp_path / "cache" / "innerloop" / "timemachine.txt")
    monkeypatch.setenv("INNERLOOP_DATA", str(tmp_path / "gone"))
    assert time_machine().source == str(cached)


def test_a_relative_cache_variable_is_ignored(module, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert module.cache_folder() == tmp_path / ".cache" / "innerloop"


def test_a_given_path_that_does_not_exist_is_refused_in_one_line(module, tmp_path):
    with pytest.raises(ValueError, match=r"^data must be a file or folder that exists; got .*gone") as caught:
        time_machine(tmp_path / "gone")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", ["given", "variable", "cache"])
def test_a_file_that_differs_is_refused_naming_file_wanted_and_got(module, tmp_path, monkeypatch, place):
    wrong = written(tmp_path / "cache" / "innerloop" / "timemachine.txt", STAND_IN + b"!")
    if place == "variable":
        wrong = written(tmp_path / "wrong.txt", STAND_IN + b"!")
        monkeypatch.setenv("INNERLOOP_DATA", str(wrong))
    with pytest.raises(ValueError, match="must be The Time Machine") as caught:
        time_machine(wrong if place == "given" else None)
    message = str(caught.value)
    got = hashlib.sha1(STAND_IN + b"!", usedforsecurity=False).hexdigest()
    assert "\n" not in message
    assert all(part in message for part in (str(wrong), module.SHA1, got))


def test_without_text_and_network_the_topics_stand_in_and_say_why(module):
    text = time_machine()
    assert (text.name, text.content) == ("pydoc topics", pydoc_topics())
    assert not text.is_time_machine
    assert "no network" in text.reason
    assert len(text.content) > 200_000


def test_a_download_is_kept_in_the_cache_under_its_name_alone(module, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(module.urllib.request, "urlopen", serve(STAND_IN, calls))
    assert time_machine().source == module.URL
    assert time_machine().source == str(tmp_path / "cache" / "innerloop" / "timemachine.txt")
    assert os.listdir(tmp_path / "cache" / "innerloop") == ["timemachine.txt"]
    assert len(calls) == 1 and 0 < calls[0][1] <= 10


def test_a_download_that_differs_is_not_kept(module, monkeypatch, tmp_path):
    monkeypatch.setattr(module.urllib.request, "urlopen", serve(b"<html>a log-in page</html>", []))
    assert time_machine().name == "pydoc topics"
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_does_not_lose_the_text(module, monkeypatch, tmp_path):
    monkeypatch.setattr(module.urllib.request, "urlopen", serve(STAND_IN, []))
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert time_machine().content == STAND_IN.decode()


def test_a_write_that_fails_half_way_leaves_nothing_behind(module, monkeypatch, tmp_path):
    def fail(partial, file):
        raise OSError("disk full")

    monkeypatch.setattr(module.urllib.request, "urlopen", serve(STAND_IN, []))
    monkeypatch.setattr(module.os, "replace", fail)
    assert time_machine().is_time_machine
    assert os.listdir(tmp_path / "cache" / "innerloop") == []
