"""How far the experiments are and how long they will take: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from innerloop.cli.bar import terminal_bar

if TYPE_CHECKING:
    from innerloop.experiments.experiment import Experiment
    from innerloop.report.record import Record

_WORDS = {"passed": "pass", "short": "short", "failed": "FAILED"}


class Progress:
    """One line a finished experiment, and below it, on a terminal, a bar over all of them.

    The time left is the experiments' own estimate, scaled by how this machine has kept to it so far.
    """

    def __init__(self, expected: Mapping[str, float], stream: TextIO | None = None, jobs: int = 1) -> None:
        """Take the seconds that each experiment is expected to need, by name, and how many run at a time."""
        self._jobs = jobs
        self._expected = dict(expected)
        self._stream = stream or sys.stderr
        self._waiting = dict(expected)
        self._spent = self._estimated = 0.0
        self._running: dict[str, float] = {}
        self._title = ""
        self._bar = terminal_bar(sum(expected.values()), self._stream)

    def __enter__(self) -> Progress:
        """Nothing to open: the bar is there from the start."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the terminal clean."""
        if self._bar is not None:
            self._bar.close()

    def started(self, experiment: Experiment) -> None:
        """One experiment begins."""
        self._running[experiment.name] = 0.0
        self._title = experiment.title
        self._show()

    def advanced(self, name: str, fraction: float) -> None:
        """A running experiment has done this fraction of its work."""
        fraction = min(max(fraction, self._running[name]), 1.0)
        if self._bar is not None:
            self._bar.update((fraction - self._running[name]) * self._expected[name])
        self._running[name] = fraction
        self._show()

    def finished(self, record: Record, *, fresh: bool) -> None:
        """Print the verdict, and the time left where there is no bar to show it."""
        self.advanced(record.name, 1.0)
        del self._running[record.name]
        expected = self._waiting.pop(record.name)
        if fresh:
            self._spent += record.seconds
            self._estimated += expected
        time_taken = seconds_in_words(record.seconds) if fresh else "kept from an earlier run"
        line = f"{record.name:<4} {_WORDS[record.verdict]:<6} {time_taken}"
        if record.verdict == "failed":
            line += f"  {record.message}"
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        else:
            left = f"  (about {seconds_in_words(self.time_left())} left)" if self._waiting and fresh else ""
            print(line + left, file=self._stream, flush=True)

    def time_left(self) -> float:
        """Seconds until the last experiment is done, by estimate."""
        pace = self._spent / self._estimated if self._estimated else 1.0
        ahead = [seconds * (1 - self._running.get(name, 0.0)) for name, seconds in self._waiting.items()]
        # However many run at a time, none ends before its own time.
        return pace * max(sum(ahead) / self._jobs, max(ahead, default=0.0))

    def _show(self) -> None:
        if self._bar is None:
            return
        shown = [f"{name} {100 * fraction:.0f}%" for name, fraction in self._running.items()]
        if len(self._running) == 1:
            shown = [f"{next(iter(self._running))} {self._title}"]
        self._bar.set_description_str("  ".join(shown)[:40], refresh=False)
        self._bar.set_postfix_str(f"{seconds_in_words(self.time_left())} left", refresh=True)


def seconds_in_words(seconds: float) -> str:
    """Return a duration as a person would say it.

    >>> [seconds_in_words(seconds) for seconds in (0.04, 12.3, 120, 200, 3599.8, 4000)]
    ['0.0 s', '12 s', '2 min', '3 min 20 s', '1 h 0 min', '1 h 7 min']
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s".removesuffix(" 0 s")
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"
