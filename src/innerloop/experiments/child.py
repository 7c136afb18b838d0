"""The process that one experiment runs in: takes an order, tells how it goes, and ends with a record.

Order and news are lines of JSON, the order on standard input, the news on what was standard output. The input stays
open as long as whoever gave the order lives; when it ends, so does this process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from innerloop.experiments import runner
from innerloop.experiments.experiment import Settings

Order = dict[str, Any]
"""``name``, ``quick``, ``data``, ``key``, and the folder ``parts`` for what is kept of a result that is not whole."""
News = dict[str, Any]
"""Either the ``fraction`` done, or the ``record`` at the end."""
_STEP = 0.002
"""News of less progress than this are kept back."""


def work(order: Order, tell: Callable[[News], None]) -> None:
    """Run one experiment; the last news is its record.

    Args:
        order: What to run.
        tell: Is called with the news.
    """
    told = [-1.0]

    def progress(fraction: float) -> None:
        if fraction >= told[0] + _STEP:
            told[0] = fraction
            tell({"fraction": fraction})

    parts = runner.Parts(Path(order["parts"]), order["key"])
    data = None if order["data"] is None else Path(order["data"])
    settings = Settings(quick=order["quick"], data=data, progress=progress, part=parts.part, kept=parts.kept)
    record = runner.run_one(runner.load(order["name"]), settings, order["key"])
    tell({"record": dataclasses.asdict(record)})


def main() -> int:
    """Obey the order on standard input; whatever else is printed goes to standard error.

    Returns:
        The exit code.
    """
    # A service stops what it runs with SIGTERM: half-written files are cleaned up on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    news = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with, args=(sys.stdin,), daemon=True).start()

    def tell(new: News) -> None:
        print(json.dumps(new), file=news, flush=True)

    work(order, tell)
    return 0


def _end_with(stream: IO[str]) -> None:
    stream.read()  # blocks until whoever holds the other end has gone
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
