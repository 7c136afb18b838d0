"""What `innerloop doctor` says of a machine, with kernels and without."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from innerloop import rules
from innerloop.checks import refusal
from innerloop.cli import doctor, main
from innerloop.kernels.native import instruction_set, missing


def said(capsys, *words):
    assert main(["doctor", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_it_says_what_is_there(capsys):
    found = json.loads(said(capsys, "--json"))
    assert found["torch"] == torch.__version__
    assert found["threads"]["torch"] == torch.get_num_threads()
    kernels = found["kernels"]
    assert kernels["present"] == (not missing())
    assert (kernels["instruction_set"] or "") == instruction_set()
    assert kernels["rules"] == [module.RULE.name for module in rules.ALL if not refusal(module.RULE)]
    if kernels["present"]:
        assert kernels["error"] < 1e-5
    text = said(capsys)
    assert torch.__version__ in text
    assert all(rule in text for rule in kernels["rules"])


@pytest.mark.parametrize("words", [["doctor"], ["doctor", "--json"]])
def test_without_kernels_it_says_why_and_all_is_well(words):
    done = subprocess.run(
        [sys.executable, "-m", "innerloop", *words], env={**os.environ, "INNERLOOP_BACKEND": "torch"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "INNERLOOP_BACKEND=torch turns the native kernels off" in done.stdout
    if words == ["doctor"]:
        assert re.search(r"^INNERLOOP_BACKEND +torch$", done.stdout, re.MULTILINE)
    else:
        assert json.loads(done.stdout)["environment"]["INNERLOOP_BACKEND"] == "torch"


def test_one_openmp_runtime_is_shared_and_two_are_not(tmp_path, monkeypatch, capsys):
    maps = tmp_path / "maps"
    monkeypatch.setattr(doctor, "_MAPS", maps)
    line = "7f0000000000-7f0000001000 r-xp 00000000 00:00 0    /somewhere/{}\n"
    maps.write_text(line.format("libgomp.so.1") * 2 + line.format("libcomplex.so") + "7f00-7f01 rw-p 0 00:00 0\n")
    found = doctor.openmp()
    assert found == {"libraries": ["libgomp.so.1"], "shared": None if missing() else True}
    maps.write_text(line.format("libgomp-24e2ab19.so.1.0.0") + line.format("libiomp5.so"))
    assert doctor.openmp()["libraries"] == ["libgomp-24e2ab19.so.1.0.0", "libiomp5.so"]
    if not missing():
        assert doctor.openmp()["shared"] is False
        assert "NOT shared" in said(capsys)
    maps.unlink()
    assert doctor.openmp() == {"libraries": [], "shared": None}


def test_this_process_maps_what_torch_brings():
    if sys.platform == "linux" and torch.backends.openmp.is_available() and not missing():
        assert doctor.openmp()["shared"] is True


def test_extras_say_what_they_lack(monkeypatch):
    lines = [
        "torch>=2.9", 'matplotlib>=3.8; extra == "report"', 'no-such-package-here>=1; extra == "lm"',
        'torch>=2.9; extra == "lm"', 'innerloop[report]; extra == "bench"', 'pytest>=8.2; extra == "dev"',
    ]  # fmt: skip
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: lines)
    found = doctor.extras()
    assert found["lm"] == ["no-such-package-here"]
    assert set(found) == {"report", "lm"}

    def absent(_):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    assert doctor.extras() == {}
