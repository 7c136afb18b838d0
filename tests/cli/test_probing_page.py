"""The page on probing runs as it stands: its code, its file of layers, its commands."""

import re
import shlex
from pathlib import Path

import pytest

from innerloop.cli import main
from innerloop.data.tasks import TASKS

PAGE = (Path(__file__).parents[2] / "docs" / "probing.md").read_text("utf-8")
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"^    innerloop (.*)$", PAGE, re.MULTILINE)
SMALL = ["--steps", "2", "--seeds", "1", "--batch", "4", "--width", "8", "--budget", "judged=4"]


def test_the_table_names_every_task():
    assert re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE) == list(TASKS)


def test_the_code_draws():
    (first,) = (block for block in CODE if "mine.py" not in block)
    names = {}
    exec(compile(first, "probing.md", "exec"), names)
    assert names["inputs"].shape == names["labels"].shape == (8, 32)


@pytest.mark.parametrize("command", [x for x in COMMANDS if not x.startswith("inspect run")])
def test_its_commands_run(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (own,) = (block for block in CODE if "mine.py" in block)
    (tmp_path / "mine.py").write_text(own, "utf-8")
    words = shlex.split(command)
    trains = words[0] == "probe" and "--list" not in words
    assert main([*words, *(SMALL if trains else [])]) == 0
    out = capsys.readouterr().out
    if trains:
        folder = tmp_path / words[words.index("--out") + 1]
        assert (folder / "table.md").is_file() and (folder / "figure.svg").is_file()
        for name in (word for word, before in zip(words[1:], words, strict=False) if before == "--layer"):
            assert f"| {name} |" in out


def test_all_commands_are_found():
    assert len(COMMANDS) == 5
