"""Run the documents' experiments and write the report.

Every result is kept in OUT/results, so that a second call runs only what is missing or whose code has changed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from innerloop import experiments
from innerloop.cli.errors import InputError
from innerloop.cli.progress import Progress, seconds_in_words
from innerloop.cli.values import path

if TYPE_CHECKING:
    from innerloop.experiments.experiment import Experiment, Settings
    from innerloop.report.page import Page
    from innerloop.report.record import Record

NAME = "reproduce"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="experiments such as A1; all if none is named")
    parser.add_argument("--quick", action="store_true", help="the short variant of those that take minutes")
    parser.add_argument("--out", type=path, default=Path("report"), metavar="DIR", help="folder to write; report")
    parser.add_argument("--data", type=path, metavar="PATH", help="file or folder that holds The Time Machine")
    parser.add_argument("--jobs", type=int, metavar="N", help="experiments at a time, one thread each; every core")
    parser.add_argument("--force", action="store_true", help="run again what has run before")
    parser.add_argument("--check", action="store_true", help="fail unless every claim's band is met, in full")
    parser.add_argument("--list", action="store_true", help="name the experiments and run none")


def run(arguments: argparse.Namespace) -> int:
    """Run what was asked for.

    Args:
        arguments: What :func:`add` declared.

    Returns:
        0, or 1 if an experiment failed.

    Raises:
        InputError: If an argument is wrong.
    """
    names = _chosen(arguments.names)
    if arguments.list:
        return _list(names)
    if arguments.check and arguments.quick:
        raise InputError("--check holds claims to their bands in full; leave out --quick")
    if arguments.jobs is not None and arguments.jobs < 1:
        raise InputError(f"--jobs must be at least 1; got {arguments.jobs}. Leave it out to use every core")
    _check_environment(arguments)
    results = _results_folder(arguments.out)
    # Read once, when torch is loaded. Threads that spin at the barriers of tiny tensors take a busy machine's time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from innerloop.experiments import runner
    from innerloop.experiments.experiment import Settings

    settings = Settings(quick=arguments.quick, data=arguments.data)
    chosen = [runner.load(name) for name in names]
    try:
        records = _run(chosen, settings, results, arguments)
        page = _write_page(records, settings, arguments.out)
    except OSError as error:
        raise InputError(f"--out must be a folder with room to write in; got {arguments.out}: {error}") from error
    code = _conclude(records, page)
    return max(code, _hold(arguments.names, records)) if arguments.check else code


def _hold(names: Sequence[str], records: Sequence[Record]) -> int:
    """Say of every claim that was not shown in full why, one a line; 1 if there is one."""
    from innerloop.experiments.catalogue import CLAIMS

    found = {record.name: record for record in records}
    wanted = {name.upper() for name in names} or {*CLAIMS, *found}
    missed = 0
    for name in sorted(wanted, key=lambda name: (name[0], int(name[1:]))):
        record = found.get(name)
        if record is None or record.verdict != "passed":
            why = "there is no experiment of it" if record is None else f"{record.verdict}: {record.message}"
            print(f"innerloop reproduce: {name}'s band is missed; {why}", file=sys.stderr)
            missed += 1
    return 1 if missed else 0


def _chosen(names: Sequence[str]) -> list[str]:
    known = list(experiments.modules())
    wanted = {name.upper() for name in names}
    unknown = sorted(wanted - set(known))
    if unknown:
        raise InputError(
            f"NAME must be one of {' '.join(known)}; got {' '.join(unknown)}. innerloop reproduce --list describes them"
        )
    return [name for name in known if name in wanted or not wanted]


def _list(names: Sequence[str]) -> int:
    from innerloop.experiments import runner

    for name in names:
        experiment = runner.load(name)
        print(f"{name:<4} {experiment.title} (about {seconds_in_words(experiment.seconds)})")
    return 0


def _check_environment(arguments: argparse.Namespace) -> None:
    if not __debug__:
        raise InputError("the checks are assert statements, which python -O drops; run without -O or PYTHONOPTIMIZE")
    missing = [module for module in ("jinja2", "matplotlib") if importlib.util.find_spec(module) is None]
    if missing:
        raise InputError(f"the report needs {' and '.join(missing)}; pip install 'innerloop[report]' brings it")
    if arguments.data is not None and not arguments.data.exists():
        raise InputError(f"--data must be a file or folder that exists; got {arguments.data}. Leave it out to search")
    named = os.environ.get("INNERLOOP_DATA")
    if arguments.data is None and named and not Path(named).exists():
        raise InputError(f"INNERLOOP_DATA must name a file or folder that exists; got {named}. Unset it to search")


def _results_folder(out: Path) -> Path:
    if out.exists() and not out.is_dir():
        raise InputError(f"--out must be a folder; got the file {out}. Name another")
    results = out / "results"
    try:
        results.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=results).close()
    except OSError as error:
        raise InputError(f"--out must be a folder that can be written; got {out}: {error.strerror}") from error
    return results


def _run(
    chosen: Sequence[Experiment], settings: Settings, results: Path, arguments: argparse.Namespace
) -> list[Record]:
    """Return the records in the order of ``chosen``."""
    from innerloop.experiments import processes, runner

    records: list[Record] = []
    expected = {e.name: runner.expected_seconds(e, settings) for e in chosen}
    jobs = arguments.jobs or processes.cores()
    try:
        with _termination_interrupts(), Progress(expected, jobs=jobs) as progress:
            running = processes.run_all(chosen, settings, results, watch=progress, jobs=jobs, force=arguments.force)
            with contextlib.closing(running):
                for record in running:
                    records.append(record)
    except KeyboardInterrupt as stop:
        done = f"{len(records)} of {len(chosen)} results are kept in {results}"
        again = "the same command without --force" if arguments.force else "the same command"
        print(f"\nInterrupted: {done}; {again} goes on from there.", file=sys.stderr)
        raise SystemExit(128 + (stop.args[0] if stop.args else signal.SIGINT)) from None
    return sorted(records, key=lambda record: list(expected).index(record.name))


@contextlib.contextmanager
def _termination_interrupts() -> Generator[None, None, None]:
    """Let SIGTERM end the run as Ctrl-C does; only the main thread may ask for that."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _write_page(records: Sequence[Record], settings: Settings, out: Path) -> Page:
    """Show every experiment: those of this call, what earlier calls left, and what has not run."""
    from innerloop.experiments import runner
    from innerloop.report.page import Entry, write_page

    found = {record.name: record for record in records}
    entries = []
    for name in experiments.modules():
        experiment = runner.load(name)
        record = found.get(name) or runner.stored(experiment, settings, out / "results")
        entries.append(Entry(experiment, record))
    return write_page(entries, out)


def _conclude(records: Sequence[Record], page: Page) -> int:
    failed = [r.name for r in records if r.verdict == "failed" or r.name in page.broken]
    if failed:
        print(f"{len(failed)} of {len(records)} failed: {' '.join(failed)}; see {page.path}", file=sys.stderr)
        return 1
    print(f"{len(records)} of {len(records)} hold; see {page.path}")
    return 0
