"""Runs an experiment, and knows which results on disk are still good."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import innerloop
from innerloop import experiments, files
from innerloop.experiments.experiment import Experiment, Result, Settings
from innerloop.report.record import Record, Verdict

PACKAGE = Path(innerloop.__file__).parent
SHORT = "short"
"""Key under which a result may say, in a sentence, why its band could not be checked in full."""
_STARTERS = ("runner", "processes", "child", "catalogue")
_NO_INFLUENCE = ("cli/", "bench/", "report/", *(f"experiments/{name}.py" for name in _STARTERS))
_QUICK = "The quick run: shorter than the setting stated, and held to what it can show."


class Parts:
    """Parts of one result in a folder of their own, kept until the whole is there."""

    def __init__(self, folder: Path, key: str) -> None:
        """Take no part of another key."""
        self.folder, self.key = folder, key

    def part(self, name: str, make: Callable[[], Result]) -> Result:
        """Return what was kept under this name, or make it and keep it."""
        path = self.folder / f"{name}.json"
        try:
            stored = json.loads(path.read_text("utf-8"))
            if stored["key"] == self.key:
                return stored["result"]
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not there, or torn: to be made
        result = json.loads(json.dumps(make()))
        self.folder.mkdir(exist_ok=True)
        files.write_text(path, json.dumps({"key": self.key, "result": result}) + "\n")
        return result

    def kept(self, name: str) -> Path:
        """Name a file of this key's own, whose folder is there."""
        self.folder.mkdir(exist_ok=True)
        return self.folder / f"{self.key[:16]}-{name}"

    def remove(self) -> None:
        """Remove all of them."""
        shutil.rmtree(self.folder, ignore_errors=True)


def load(name: str) -> Experiment:
    """Import an experiment, or stand in for one that cannot be imported and fails when it is run."""
    try:
        return experiments.load(name)
    except Exception as error:  # what a module raises is anybody's guess; the others must run
        return _unloadable(name, error)


def _unloadable(name: str, error: Exception) -> Experiment:
    def run(settings: Settings) -> Result:
        raise error

    return Experiment(
        name=name,
        title="Cannot be imported",
        claim=_one_line(error),
        source="",
        setting="",
        band="",
        run=run,
        check=lambda result: None,
        tables=lambda result: [],
        figures=lambda result: [],
        seconds=0.0,
    )


def stored(
    experiment: Experiment,
    settings: Settings,
    folder: Path,
    *,
    key: Callable[[Experiment, bool], str] | None = None,
) -> Record | None:
    """Return the result of an earlier run with this code and these settings, if there is one that may be kept.

    What raised runs again, for the cause may have been the machine; what ran without its data runs again once other
    data are named.
    """
    quick = shortened(experiment, settings)
    record = Record.read(result_file(experiment, folder, quick=quick))
    if record is None or record.name != experiment.name or record.result is None:
        return None
    if SHORT in record.result and record.data != _data(settings):
        return None
    return record if record.key == (key or code_key)(experiment, quick) else None


def shortened(experiment: Experiment, settings: Settings) -> bool:
    """Whether this run is less than the full one: an experiment without a quick variant runs in full."""
    return settings.quick and experiment.quick_seconds is not None


def expected_seconds(experiment: Experiment, settings: Settings) -> float:
    """The experiment's own rough estimate of its time."""
    quick = experiment.quick_seconds if settings.quick else None
    return experiment.seconds if quick is None else quick


def result_file(experiment: Experiment, folder: Path, *, quick: bool) -> Path:
    """Where a result is kept; a quick run never overwrites a full one."""
    return folder / (f"{experiment.name}.quick.json" if quick else f"{experiment.name}.json")


def code_key(experiment: Experiment, quick: bool) -> str:
    """Name the code and the settings that make a result: equal keys, equal numbers."""
    return _digest([sources_key(PACKAGE), experiment.name, quick])


@functools.cache
def sources_key(package: Path) -> str:
    """Hash the package's sources, save those that only start runs and show results."""
    files = sorted(path for path in package.rglob("*") if path.suffix in {".py", ".cpp", ".h"})
    names = [path.relative_to(package).as_posix() for path in files]
    return _digest([[n, p.read_text("utf-8")] for n, p in zip(names, files, strict=True) if not _is_neutral(n)])


def _is_neutral(name: str) -> bool:
    return name.startswith(_NO_INFLUENCE)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def run_one(experiment: Experiment, settings: Settings, key: str) -> Record:
    """Run an experiment here and now, whatever it raises.

    Args:
        experiment: What to run.
        settings: Where and how much.
        key: What its result is good for.

    Returns:
        The record, which is not on disk yet.
    """
    begin = time.perf_counter()
    result, trace = None, ""
    try:
        # Through JSON at once, so that what is checked and drawn now is what is read back later.
        result = json.loads(json.dumps(experiment.run(settings)))
        seconds = time.perf_counter() - begin
        verdict, message = _judge(experiment, result, settings)
    except Exception as error:
        seconds = time.perf_counter() - begin
        verdict, message = "failed", _one_line(error)
        trace = "" if result is not None and isinstance(error, AssertionError) else traceback.format_exc()
    return record_of(
        experiment, settings, key, verdict=verdict, message=message, trace=trace, result=result, seconds=seconds
    )


def record_of(
    experiment: Experiment,
    settings: Settings,
    key: str,
    *,
    message: str,
    verdict: Verdict = "failed",
    trace: str = "",
    result: Result | None = None,
    seconds: float = 0.0,
) -> Record:
    """Say of an experiment what came of it, and where and when."""
    return Record(
        name=experiment.name,
        key=key,
        verdict=verdict,
        message=message,
        traceback=trace,
        result=result,
        seconds=seconds,
        quick=settings.quick,
        data=_data(settings),
        command=f"innerloop reproduce {experiment.name}{' --quick' if settings.quick else ''}",
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        torch=importlib.metadata.version("torch"),
        commit=commit_of(PACKAGE),
        machine=_machine(),
    )


def _judge(experiment: Experiment, result: Result, settings: Settings) -> tuple[Verdict, str]:
    experiment.check(result)
    if SHORT in result:
        return "short", str(result[SHORT])
    return ("short", _QUICK) if settings.quick else ("passed", "")


def _one_line(error: Exception) -> str:
    words = " ".join(str(error).split())
    return words if isinstance(error, AssertionError) and words else f"{type(error).__name__}: {words}"


def _data(settings: Settings) -> str:
    named = settings.data or os.environ.get("INNERLOOP_DATA", "")
    return str(Path(named).resolve()) if named else ""


@functools.cache
def _machine() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cores": cores, "cpu": _cpu(), "python": platform.python_version()}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


@functools.cache
def commit_of(package: Path) -> str | None:
    """The commit of the sources, with a plus sign if they have changed since; None outside a checkout."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(package), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        # A package installed below someone else's checkout is not part of it.
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
