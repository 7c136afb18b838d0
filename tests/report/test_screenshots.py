"""The script that photographs the report: its refusals here; the pictures need a browser and eyes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "screenshots.py"


def run(page: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(SCRIPT), str(page), str(folder)]
    return subprocess.run(words, capture_output=True, text=True, env=environment, timeout=60)


def test_without_a_browser_it_says_what_to_install(tmp_path):
    done = run(tmp_path / "index.html", tmp_path, PATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("screenshots: no Chromium")
    assert done.stderr.count("\n") == 1


def test_a_named_browser_must_exist(tmp_path):
    done = run(tmp_path / "index.html", tmp_path, CHROMIUM=str(tmp_path / "chromium"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_without_a_page_it_says_how_to_make_one(tmp_path):
    done = run(tmp_path / "index.html", tmp_path, CHROMIUM=sys.executable)
    assert done.returncode == 2
    assert "make report" in done.stderr
