"""Rows of a board, one after another under a bar, written out after each, until done or interrupted."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from innerloop.cli.bar import Bar
from innerloop.cli.progress import seconds_in_words

Chosen = TypeVar("Chosen")
Row = TypeVar("Row")
Progress = Callable[[float], None]


@dataclass(frozen=True, kw_only=True)
class Rows(Generic[Chosen, Row]):
    """What a command makes rows of, and how it shows them."""

    command: str
    title: str
    """Of the bar."""
    folder: Path
    named: Callable[[Chosen], str]
    """The layer's name, by which seeds are joined."""
    row: Callable[[Chosen, int, Progress], tuple[Row, bool]]
    """Makes a row or finds it: the row, and whether it is new."""
    said: Callable[[Row], str]
    """What a row says in a line."""
    summarised: Callable[[list[Row]], Any]
    """Joins the seeds of a layer, as a dataclass."""
    table: Callable[[list[Any]], str]
    """Of summaries, as Markdown."""
    figure: Callable[[list[list[Row]]], str]
    """Of rows by layer, as SVG; needs matplotlib."""
    earlier: Mapping[str, list[Row]] = field(default_factory=dict)
    """Rows by layer that are kept from other commands and belong into the same table."""

    def run(self, wanted: Sequence[tuple[Chosen, int]]) -> int:
        """Run those that are missing.

        Args:
            wanted: Layers and seeds.

        Returns:
            0; 1 if a row failed; 130 if it was interrupted.
        """
        rows = {name: list(found) for name, found in self.earlier.items()}
        failed = 0
        bar = Bar(len(wanted), self.title)
        try:
            for number, (chosen, seed) in enumerate(wanted):
                begin, name = time.perf_counter(), self.named(chosen)
                try:
                    row, fresh = self.row(chosen, seed, lambda part, done=number: bar.reach(done + part, ""))
                except FloatingPointError as error:
                    failed += 1
                    bar.say(f"{name}, seed {seed}: {error}")
                    continue
                rows.setdefault(name, []).append(row)
                taken = seconds_in_words(time.perf_counter() - begin) if fresh else "kept from an earlier run"
                bar.say(f"{name}, seed {seed}: {self.said(row)}  ({taken})")
                self._write(list(rows.values()))
        except KeyboardInterrupt:
            bar.close()
            done = sum(map(len, rows.values())) - sum(map(len, self.earlier.values()))
            print(f"\nInterrupted: {done} of {len(wanted)} rows are kept in {self.folder / 'rows'}; the same command "
                  "goes on from there.", file=sys.stderr)  # fmt: skip
            return 130
        finally:
            bar.close()
        return self._conclude(list(rows.values()), failed)

    def _write(self, rows: list[list[Row]]) -> None:
        """Write what there is: a table for readers, one for programs, and, with matplotlib, a figure."""
        from innerloop import files

        summaries = [self.summarised(found) for found in rows]
        files.write_text(self.folder / "table.md", self.table(summaries))
        files.write_text(self.folder / "table.json", json.dumps([asdict(x) for x in summaries], indent=1) + "\n")
        if importlib.util.find_spec("matplotlib") is not None:
            files.write_text(self.folder / "figure.svg", self.figure(rows))

    def _conclude(self, rows: list[list[Row]], failed: int) -> int:
        if rows:
            print(self.table([self.summarised(found) for found in rows]), end="")
            names = [self.folder / name for name in ("table.md", "figure.svg")]
            print(f"\nKept as {' and '.join(str(path) for path in names if path.is_file())}")
        if failed:
            print(f"innerloop {self.command}: {failed} rows did not stay finite; try a lower --rate with another --out",
                  file=sys.stderr)  # fmt: skip
        return 1 if failed else 0
