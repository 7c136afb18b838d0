"""Run tests against changed copies of the package, several at once, without touching the checkout."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _pytest.nodes import Node
    from pytest import CallInfo, TestReport

ROOT = Path(__file__).parents[2]
PRELOADED = ("hypothesis", "numpy", "pytest", "torch", "torch._dynamo.testing", "torch.export", "torch.library")
"""Imported once, before forking: a new process would spend more on them than on most trials."""


@dataclass(frozen=True)
class Trial:
    """A change of the package, and the tests that should notice."""

    name: str
    edits: dict[str, str]
    """New text of each changed file, by its path below ``src/innerloop``; empty to run the package as it is."""
    tests: tuple[str, ...]
    """What pytest is given: files or node ids below the root."""
    native: bool = False
    """Whether the kernels are built and serve; else everything runs in torch, which is quicker to set up."""


@dataclass(frozen=True)
class Outcome:
    """What became of a trial."""

    trial: Trial
    verdict: str
    """``caught`` by a comparison, ``crashed`` by any other error, ``stuck`` past the limit, or ``survived``."""
    seconds: float
    test: str = ""
    why: str = ""


@dataclass
class _Running:
    trial: Trial
    process: Any
    home: Path
    began: float = field(default_factory=time.monotonic)


def run_trials(trials: Sequence[Trial], *, jobs: int, limit: float) -> Iterator[Outcome]:
    """Yield the outcome of every trial as it ends; each runs in a process and a copy of the package of its own.

    Args:
        trials: What to run.
        jobs: How many at once.
        limit: Seconds after which a trial counts as stuck.

    Yields:
        Outcomes, in the order in which they end.
    """
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # what is imported stays: no child has to look through it
    fork = multiprocessing.get_context("fork")
    waiting, running = list(reversed(trials)), {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        base = _snapshot(Path(folder) / "base")
        while waiting or running:
            while waiting and len(running) < jobs:
                trial = waiting.pop()
                home = _copy(base, Path(folder) / f"trial-{len(waiting)}", trial.edits)
                mine, theirs = fork.Pipe(duplex=False)
                process = fork.Process(target=_work, args=(theirs, base, home, trial))
                process.start()
                theirs.close()
                running[mine] = _Running(trial, process, home)
            ready = wait(list(running), timeout=1.0)
            for connection, one in list(running.items()):
                if connection in ready or time.monotonic() - one.began > limit:
                    yield _finish(connection, one)
                    del running[connection]


def _snapshot(base: Path) -> Path:
    """Copy what the tests need, so that an edit of the checkout during the run changes nothing."""
    for name in ("src/innerloop", "tests", "pyproject.toml", "README.md", "CMakeLists.txt"):
        source, target = ROOT / name, base / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)
    return base


def _copy(base: Path, home: Path, edits: dict[str, str]) -> Path:
    package = home / "innerloop"
    # Symbolic links: only what is changed is a file of its own.
    for source in (base / "src" / "innerloop").rglob("*"):
        if source.suffix in (".py", ".h", ".cpp"):
            target = package / source.relative_to(base / "src" / "innerloop")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)
    for name, text in edits.items():
        (package / name).unlink()
        (package / name).write_text(text, encoding="utf-8")
    return home


def _finish(connection: Connection, one: _Running) -> Outcome:
    seconds = time.monotonic() - one.began
    try:
        verdict, test, why = connection.recv() if connection.poll() else ("stuck", "", "")
    except EOFError:
        verdict, test, why = "crashed", "", "the process died"
    one.process.kill()
    one.process.join()
    connection.close()
    shutil.rmtree(one.home, ignore_errors=True)
    return Outcome(one.trial, verdict, seconds, test, why)


def _built(base: Path, home: Path) -> bool:
    """Build the kernels of a copy, and say whether they compile; one instruction set is enough, and unoptimised."""
    source = home / "source"
    (source / "src").mkdir(parents=True)
    (source / "src" / "innerloop").symlink_to(home / "innerloop")
    (source / "CMakeLists.txt").symlink_to(base / "CMakeLists.txt")
    target = home / "innerloop" / "kernels" / "cpu"
    options = ("-DINNERLOOP_QUICK=ON", f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}")
    commands = (["cmake", "-S", source, "-B", home / "build", *options], ["cmake", "--build", home / "build"])
    return all(subprocess.run(command, capture_output=True, check=False).returncode == 0 for command in commands)


def _work(connection: Connection, base: Path, home: Path, trial: Trial) -> None:
    """Run pytest up to the first failure, in a child process."""
    import pytest

    if trial.native and not _built(base, home):
        connection.send(("crashed", "", "the kernels do not compile"))
        os._exit(0)
    os.chdir(base)
    sys.path.insert(0, str(home))
    sys.dont_write_bytecode = True
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    recorder = _Recorder()
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *trial.tests], plugins=[recorder])
    import innerloop

    assert Path(innerloop.__file__).is_relative_to(home), "the tests must see the changed copy"
    assert not trial.native or not innerloop.kernels.native.missing(), "the tests must see the changed kernels"
    if recorder.failure is not None:
        connection.send(recorder.failure)
    else:
        connection.send(("survived", "", "") if code == 0 else ("crashed", "", f"pytest ended with {code!s}"))
    connection.close()
    os._exit(0)


class _Recorder:
    """A pytest plugin that keeps the first failure."""

    def __init__(self) -> None:
        self.failure: tuple[str, str, str] | None = None

    def pytest_exception_interact(self, node: Node, call: CallInfo[object], report: TestReport) -> None:
        if self.failure is None and call.excinfo is not None:
            error = call.excinfo.value
            # What compares raises these; anything else is a crash, which any test would have noticed.
            compared = isinstance(error, AssertionError) or type(error).__name__ in (
                "Failed",
                "GradcheckError",
                "OpCheckError",
            )
            first = (str(error) or type(error).__name__).splitlines()[0]
            text = first if compared else f"{type(error).__name__}: {first}"
            self.failure = ("caught" if compared else "crashed", report.nodeid or node.nodeid, text)
