"""The walk through training in the documentation runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from innerloop.data import pydoc_topics

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "training.md").read_text("utf-8")


@pytest.fixture
def shell(tmp_path):
    """Run a script as a reader would, ``innerloop`` being this package."""
    command = tmp_path / "bin" / "innerloop"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m innerloop "$@"\n')
    command.chmod(0o755)
    (tmp_path / "book.txt").write_text(pydoc_topics()[:8000], "utf-8")

    def run(script):
        words = f'export PATH="{command.parent}:$PATH"; set -e\n{script}'
        return subprocess.run(["bash", "-c", words], cwd=tmp_path, capture_output=True, text=True, timeout=600)

    return run


@pytest.mark.slow
def test_the_walk_runs_as_it_stands(shell, tmp_path, monkeypatch):
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 6
    outputs = []
    for block in blocks:
        done = shell(block)
        assert done.returncode == 0, (block, done.stderr)
        outputs.append(done.stdout)
    trained, resumed, same, judged, read, compared = outputs
    assert trained.startswith("Trained: step 60.") and resumed.startswith("Trained: step 60.")
    assert same == ""
    assert "perplexity" in judged and '"bits_per_byte"' in judged
    assert read.startswith("The ") and len(read) > 30
    assert compared.count("| ") > 20 and (tmp_path / "compared" / "figure.svg").is_file()
    lines = [line.split(",")[:3] for line in (tmp_path / "killed" / "log.csv").read_text().splitlines()]
    assert lines == [line.split(",")[:3] for line in (tmp_path / "run" / "log.csv").read_text().splitlines()]
    (python,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(python, "training.md", "exec"), names)
    assert names["logits"].shape[-1] == 259


def test_every_option_it_names_exists(capsys):
    from innerloop.cli import main

    helps = ""
    for command in ("train", "evaluate", "generate", "compare"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        helps += capsys.readouterr().out
    for option in sorted(set(re.findall(r"`?(--[a-z][a-z-]+)", PAGE))):
        assert option in helps, option
