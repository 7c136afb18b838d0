"""Runs so small that a test can train one several times."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from innerloop import states
from innerloop.data import pydoc_topics
from innerloop.lm import Config
from innerloop.training import Plan, Run, TrainingOptions, find

OPTIONS = {
    "steps": 12, "batch": 3, "length": 16, "rate": 1e-2, "warmup": 3, "log_every": 2, "evaluate_every": 4,
    "evaluate_windows": 5, "save_every": 5, "seed": 1,
}  # fmt: skip
MODEL = {"vocab_size": 259, "width": 16, "heads": 2, "pattern": "gated_delta_rule+attention", "dropout": 0.2}


class Recorder:
    """A watch that remembers, and stops a run after a step."""

    def __init__(self, stop_at=None):
        self.stop_at, self.step, self.told = stop_at, 0, []

    def begun(self, step, steps, tokens):
        self.step = step
        self.told.append(("begun", step))

    def updated(self, step, update, seconds):
        assert seconds > 0
        self.step = step
        self.told.append(("updated", step, update))

    def logged(self, step, loss, tokens_per_second):
        assert tokens_per_second > 0
        self.told.append(("logged", step, loss))

    def validated(self, step, score):
        self.told.append(("validated", step, score))

    def saved(self, step):
        self.told.append(("saved", step))

    def stop(self):
        return self.step == self.stop_at

    def named(self, name):
        return [told[1:] for told in self.told if told[0] == name]


def outcome(folder):
    """Return all of a run that must not depend on how often it stopped."""
    path = find(folder)
    _, weights = states.read(path / "model.safetensors")
    _, moments = states.read(path / "optimizer.safetensors")
    rows = [line.split(",") for line in (Path(folder) / "log.csv").read_text().splitlines()]
    progress = json.loads((path / "progress.json").read_text())
    counted = {key: progress["progress"][key] for key in ("loss", "updates")}
    return {
        "step": (path.name, progress["step"], counted),
        "weights": weights,
        "moments": moments,
        "log": [row[:5] for row in rows],  # the others are times
        "validation": (Path(folder) / "validation.csv").read_text(),
    }


def assert_same(got, want):
    """Compare two outcomes to the bit."""
    for name in ("step", "log", "validation"):
        assert got[name] == want[name]
    for name in ("weights", "moments"):
        assert got[name].keys() == want[name].keys()
        for key, x in want[name].items():
            assert torch.equal(got[name][key], x), key


@pytest.fixture(scope="session")
def kit(tmp_path_factory):
    """What tests build with; test files cannot import each other."""

    class Kit:
        options, model = OPTIONS, MODEL
        recorder, outcome, assert_same = Recorder, staticmethod(outcome), staticmethod(assert_same)
        text = pydoc_topics()[:6000]

        @staticmethod
        def plan(place, model=None, **changed):
            options = TrainingOptions(**{**OPTIONS, **{k: changed.pop(k) for k in [*changed] if k in OPTION_NAMES}})
            return Plan(place=str(place), config=Config(**{**MODEL, **(model or {})}), options=options, **changed)

    OPTION_NAMES = TrainingOptions.__dataclass_fields__
    place = tmp_path_factory.mktemp("text") / "book.txt"
    place.write_text(Kit.text, "utf-8")
    Kit.place = place
    return Kit


@pytest.fixture(scope="session")
def prepared(kit, tmp_path_factory):
    """A run that has not begun; copy it."""
    return Run.prepare(tmp_path_factory.mktemp("prepared") / "run", kit.plan(kit.place)).folder


@pytest.fixture
def folder(prepared, tmp_path):
    """A copy of it for one test."""
    shutil.copytree(prepared, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="session")
def whole(kit, prepared, tmp_path_factory):
    """The outcome of that run, never stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    shutil.copytree(prepared, folder)
    Run.open(folder).train(Recorder())
    return folder
