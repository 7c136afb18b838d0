"""Random calls of every rule, and that a wrong answer among them would be noticed and can be run again."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from innerloop import ops, rules

ROOT = Path(__file__).parents[1]
NAMES = [module.RULE.name for module in rules.ALL]


@pytest.fixture
def fuzz(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from scripts.fuzz import search

    return search


@pytest.mark.parametrize("name", NAMES)
def test_random_calls_meet_their_bars(name, fuzz):
    assert fuzz.fuzz(10, 11, [name]) == 10


def read(text):
    from scripts.fuzz.example import read

    return read(text)


def test_a_wrong_rule_is_found_made_small_and_printed(fuzz, monkeypatch):
    step = ops.step

    def wrong(rule, q, k, v, *, state, **gates):
        o, state = step(rule, q, k, v, state=state, **gates)
        return o * (1 + 1e-3), state

    monkeypatch.setattr(ops, "step", wrong)
    with pytest.raises(fuzz.Failed, match="o is off by") as failed:
        fuzz.fuzz(300, 0, ["delta_rule"])
    command = shlex.split(str(failed.value).splitlines()[-1])
    found = json.loads(command[-1])
    assert found["form"] == "step"
    assert found.get("T", 1) == 1  # made small
    with pytest.raises(AssertionError, match="o is off by"):
        fuzz.check(read(command[-1]))


def test_the_command_takes_one_example_or_a_seed(fuzz):
    example = fuzz.Example("mamba2", T=5, lengths=(2, 0), junk=(1, 1), edges="some", state=True, tracked=255)
    assert read(shlex.split(example.command())[-1]) == example
    done = subprocess.run(
        [sys.executable, *shlex.split(example.command())[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout[:5]) == (0, "holds"), done.stderr
    wrong = subprocess.run(
        [sys.executable, "-m", "scripts.fuzz", "--example", '{"rule": "delta"}'],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert wrong.returncode == 1
    assert "rule must be one of" in wrong.stderr
