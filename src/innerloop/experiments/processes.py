"""Runs experiments beside each other, each in a process of its own with one thread; keeps every result on disk."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from innerloop.experiments import runner
from innerloop.experiments.child import News, Order
from innerloop.experiments.experiment import Experiment, Settings
from innerloop.report.record import Record

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_PATIENCE = 10.0
"""Seconds that a process gets to clean up before it is killed."""


class Watch(Protocol):
    """Someone who is told how the work goes."""

    def started(self, experiment: Experiment) -> None:
        """One experiment begins; others may be running."""

    def advanced(self, name: str, fraction: float) -> None:
        """A running experiment has done this fraction of its work."""

    def finished(self, record: Record, *, fresh: bool) -> None:
        """A result is on disk; not ``fresh`` if it was there before."""


class Running(Protocol):
    """An experiment that runs elsewhere."""

    def stop(self) -> None:
        """End it; it may have ended already."""


Tell = Callable[[News | int], None]
"""Called with news, and once more at the end with the exit code."""


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Child:
    """A Python process in a group of its own, so that Ctrl-C on a terminal is for its parent alone to answer."""

    module = "innerloop.experiments.child"
    """What it runs."""

    def __init__(self, order: Order, tell: Tell) -> None:
        """Start it."""
        path = os.pathsep.join(filter(None, (str(runner.PACKAGE.parent), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", self.module],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", process_group=0,
            env=os.environ | dict.fromkeys(THREADS, "1") | {"PYTHONPATH": path},
        )  # fmt: skip
        threading.Thread(target=self._listen, args=(tell,), daemon=True).start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # gone already, which its exit code will say
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def _listen(self, tell: Tell) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # torn by a death in the middle of a line
                tell(json.loads(line))
        code = self._process.wait()
        assert self._process.stdin is not None
        for pipe in (self._process.stdout, self._process.stdin):
            with contextlib.suppress(BrokenPipeError):  # an order that nobody read
                pipe.close()
        tell(code)

    def stop(self) -> None:
        """Ask it to end, and kill it if it does not."""
        self._process.terminate()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass
class _Job:
    """One experiment that has to run."""

    experiment: Experiment
    settings: Settings
    key: str
    place: Path
    """Where its result goes."""
    record: Record | None = None
    running: Running | None = None

    @property
    def parts(self) -> runner.Parts:
        return runner.Parts(self.place.with_suffix(".parts"), self.key)

    def order(self) -> Order:
        data = self.settings.data
        return {
            "name": self.experiment.name, "quick": self.settings.quick, "key": self.key,
            "data": None if data is None else str(data), "parts": str(self.parts.folder),
        }  # fmt: skip


def run_all(
    chosen: Sequence[Experiment],
    settings: Settings,
    folder: Path,
    *,
    watch: Watch,
    jobs: int = 1,
    force: bool = False,
    key: Callable[[Experiment, bool], str] | None = None,
    start: Callable[[Order, Tell], Running] | None = None,
) -> Generator[Record, None, None]:
    """Run experiments, at most ``jobs`` at a time, those that take longest first; one that fails stops no other.

    Each has a process with one thread, so that its numbers do not depend on ``jobs``. Those that measure time run with
    nothing beside them, before the others. A process that dies (out of memory, killed) leaves a failed record. When the
    iterator is closed or interrupted, the processes are ended; parts of a result that they have kept stay on disk.

    Args:
        chosen: What to run.
        settings: Where and how much; ``progress`` and what keeps parts are set here.
        folder: Where results are kept, one file each; it must exist.
        watch: Told of every beginning, advance and end.
        jobs: Processes at a time, at least 1.
        force: Run even what has run before.
        key: Replaces :func:`runner.code_key`, for tests.
        start: Replaces :class:`Child`, for tests.

    Yields:
        The record of each experiment once it is on disk: kept ones first, in the order of ``chosen``, then as they end.

    Raises:
        OSError: If a result cannot be written.
    """
    waiting: list[_Job] = []
    for experiment in chosen:
        mine = replace(settings, quick=runner.shortened(experiment, settings))
        record = None if force else runner.stored(experiment, mine, folder, key=key)
        if record is None:
            place = runner.result_file(experiment, folder, quick=mine.quick)
            waiting.append(_Job(experiment, mine, (key or runner.code_key)(experiment, mine.quick), place))
            if force:
                waiting[-1].parts.remove()
        else:
            watch.started(experiment)
            watch.finished(record, fresh=False)
            yield record
    yield from _run_waiting(_in_order(waiting), watch, jobs, start or Child)


def _in_order(jobs: Sequence[_Job]) -> list[_Job]:
    """Those that run alone first, then by time, for the last to end should not begin last."""

    def expected(job: _Job) -> float:
        return runner.expected_seconds(job.experiment, job.settings)

    return sorted(jobs, key=lambda job: (not job.experiment.alone, -expected(job)))


def _run_waiting(
    waiting: list[_Job], watch: Watch, jobs: int, start: Callable[[Order, Tell], Running]
) -> Generator[Record, None, None]:
    news: queue.SimpleQueue[tuple[_Job, News | int]] = queue.SimpleQueue()
    running: list[_Job] = []

    def begin(job: _Job) -> None:
        watch.started(job.experiment)
        running.append(job)
        job.running = start(job.order(), lambda new: news.put((job, new)))

    try:
        while waiting or running:
            while waiting and _may_begin(waiting[0], running, jobs):
                begin(waiting.pop(0))
            job, new = news.get()
            if isinstance(new, int):
                running.remove(job)
                record = _kept(job, new)
                watch.finished(record, fresh=True)
                yield record
            elif "record" in new:
                job.record = Record(**new["record"])
            else:
                watch.advanced(job.experiment.name, new["fraction"])
    finally:
        _stop(running)


def _may_begin(job: _Job, running: Sequence[_Job], jobs: int) -> bool:
    if job.experiment.alone or any(other.experiment.alone for other in running):
        return not running
    return len(running) < jobs


def _kept(job: _Job, code: int) -> Record:
    """Put on disk what an experiment has left, or that its process has left nothing."""
    record = job.record or runner.record_of(job.experiment, job.settings, job.key, message=_death(code))
    record.write(job.place)
    if record.result is not None:
        job.parts.remove()
    return record


def _death(code: int) -> str:
    if code >= 0:
        return f"its process ended with exit code {code} and no result; run it again for what it prints"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    why = "; the system does that to a process when memory runs out" if name == "SIGKILL" else ""
    return f"its process was ended by signal {name}{why}"


def _stop(running: Sequence[_Job]) -> None:
    """End all at once, rather than one after another."""
    threads = [threading.Thread(target=job.running.stop) for job in running if job.running is not None]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
