"""Time the kernels against the alternatives on this machine.

Without a rule the whole table is measured, which takes ten minutes; with one, that rule in one shape. Rows of the
table can be measured again, and take the place of the earlier ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from innerloop.cli.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from innerloop.bench.compare import Pace

NAME = "bench"
_AGAINST = ("torch", "transformers", "sdpa", "loop")
_WAYS = ("forward", "both", "decode")
_DTYPES = ("float64", "float32", "bfloat16", "float16")
_AXES = "BTHGKV"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--rule", metavar="RULE", help="time this rule alone; innerloop rules lists them")
    parser.add_argument("--row", metavar="TEXT", action="append", help="measure rows whose titles have it; repeatable")
    parser.add_argument("--shape", metavar="SIZES", help="such as B=1,T=2048,H=16,K=128, the sizes left out are these")
    parser.add_argument("--way", choices=_WAYS, action="append", help="which way, all if left out; may be repeated")
    parser.add_argument("--against", choices=_AGAINST, action="append", help="whom, all if left out; may be repeated")
    parser.add_argument("--dtype", choices=_DTYPES, help="of the inputs; float32")
    parser.add_argument("--threads", type=int, metavar="N", help="for everyone; torch's own number if left out")
    parser.add_argument("--seconds", type=float, default=4.0, metavar="S", help="for a comparison, about; 4")
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory, which takes more processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers; in a folder, named by machine")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table and the figures as a Markdown page")
    parser.add_argument("--results", type=Path, metavar="FILE", help="an earlier --json, for a page or for --row")


def run(arguments: argparse.Namespace) -> int:
    """Measure what was asked for.

    Args:
        arguments: What :func:`add` declared.

    Returns:
        0, also where a row falls short: a slow machine is no fault.

    Raises:
        InputError: If an argument is wrong.
    """
    _check(arguments)
    result = _read(arguments.results) if arguments.results is not None else {}
    if not result or arguments.row:
        from innerloop.bench.compare import Pace
        from innerloop.files import write_text

        _set_threads(arguments.threads)
        pace = Pace(arguments.seconds, not arguments.no_memory)
        if arguments.row:
            result = _again(arguments.row, pace, result)
        else:
            result = _one(arguments, pace) if arguments.rule else _whole_table(pace)
        target = arguments.results or (arguments.json and _target(arguments.json, result["machine"]))
        if target is not None:
            write_text(target, json.dumps(result, indent=1) + "\n")
    if arguments.page is not None:
        _write_page(arguments.page, result)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if not 0 < arguments.seconds <= 3600:
        raise InputError(f"--seconds must be above 0 and at most 3600; got {arguments.seconds}")
    if arguments.threads is not None and not 1 <= arguments.threads <= 4096:
        raise InputError(f"--threads must be at least 1 and at most 4096; got {arguments.threads}")
    for name in ("shape", "way", "against", "dtype"):
        if getattr(arguments, name) is not None and not arguments.rule:
            raise InputError(f"--{name} is for one rule: name it with --rule, or leave --{name} out")
    if arguments.page is not None and arguments.rule:
        raise InputError("--page is for the whole table: leave --rule out, or --page")
    if arguments.row and (arguments.rule or (arguments.page is not None and arguments.results is None)):
        raise InputError("--row measures rows of the whole table: leave --rule out, and name --results for a --page")
    if arguments.results is not None and (arguments.json is not None or arguments.rule):
        raise InputError("--results has the numbers of an earlier table: leave --json and --rule out")
    if arguments.results is not None and arguments.page is None and not arguments.row:
        raise InputError("--results draws a page from earlier numbers: give it --page, or rows to measure with --row")
    for name in ("json", "page"):
        path = getattr(arguments, name)
        # After minutes of measuring it would be too late to find out.
        if path is not None and not (path.is_dir() or path.absolute().parent.is_dir()):
            raise InputError(f"--{name} must lie in a folder that exists; got {path}")
    if arguments.page is not None and arguments.page.is_dir():
        raise InputError(f"--page must be a file; got the folder {arguments.page}")


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        assert {"machine", "rows", "rules", "curves", "neighbours"} <= set(result)
    except (OSError, ValueError, AssertionError) as error:
        raise InputError(f"--results must be a whole table that `innerloop bench --json` wrote; got {path}") from error
    return result


def _set_threads(threads: int | None) -> None:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)


def _told(words: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)


def _done(row: dict[str, Any]) -> None:
    from innerloop.bench.page import row_text

    _told("")
    print(row_text(row), flush=True)


def _whole_table(pace: Pace) -> dict[str, Any]:
    from innerloop.bench.everything import measure_everything

    result = measure_everything(pace, lambda words: _told(f"… {words}"), _done)
    verdicts = [row["verdict"] for row in result["rows"]]
    _told("")
    print(", ".join(f"{verdicts.count(word)} {word}" for word in ("pass", "short", "absent") if word in verdicts))
    return {**result, "command": "innerloop bench"}


def _again(wanted: Sequence[str], pace: Pace, earlier: dict[str, Any]) -> dict[str, Any]:
    """Measure rows, and put them where an earlier table has those of their names."""
    from innerloop.bench.everything import ROWS, measure_rows
    from innerloop.bench.machine import describe, file_name

    here = file_name(describe())
    if earlier and file_name(earlier["machine"]) != here:
        raise InputError(f"--results must be of this machine, {here}; got {file_name(earlier['machine'])}")
    for text in wanted:
        if not any(text in row.title for row in ROWS):
            titles = "; ".join(row.title for row in ROWS)
            raise InputError(f"--row must be part of a row's title, one of {titles}; got {text!r}")
    chosen = [row for row in ROWS if any(text in row.title for text in wanted)]
    found = {row["title"]: row for row in measure_rows(chosen, pace, lambda words: _told(f"… {words}"), _done)}
    if not earlier:
        return {"machine": describe(), "rows": list(found.values())}
    kept = [found.pop(row["title"], row) for row in earlier["rows"]]
    return {**earlier, "rows": [*kept, *found.values()]}


def _one(arguments: argparse.Namespace, pace: Pace) -> dict[str, Any]:
    from innerloop.network import find

    return _one_rule(arguments, pace) if find(arguments.rule) is None else _one_network(arguments, pace)


def _one_network(arguments: argparse.Namespace, pace: Pace) -> dict[str, Any]:
    from innerloop.bench.machine import describe
    from innerloop.bench.networks import NETWORK_ROWS
    from innerloop.bench.page import row_text

    for name in ("shape", "way", "against", "dtype"):
        if getattr(arguments, name) is not None:
            raise InputError(f"--{name} is for rules with matrices; {arguments.rule} is timed at the table's shapes")
    chosen = [row for row in NETWORK_ROWS if row.workload.rule == arguments.rule]
    if not chosen:
        timed = dict.fromkeys(row.workload.rule for row in NETWORK_ROWS)
        raise InputError(f"--rule has rows for {', '.join(timed)} and rules with matrices; got {arguments.rule}")
    found = []
    for row in chosen:
        found.append(row.measure(pace))
        print(row_text(found[-1]), flush=True)
    return {"machine": describe(), "rows": found}


def _one_rule(arguments: argparse.Namespace, pace: Pace) -> dict[str, Any]:
    from innerloop.bench.compare import compare
    from innerloop.bench.machine import describe
    from innerloop.bench.page import comparison_text
    from innerloop.bench.workload import Workload
    from innerloop.rule import get

    try:
        name = get(arguments.rule).name
    except ValueError as error:
        raise InputError(str(error)) from error
    sizes = _sizes(arguments.shape or "")
    found = []
    for way in arguments.way or _WAYS:
        workload = Workload(name, way, **sizes, dtype=arguments.dtype or "float32")
        try:
            found.append(compare(workload, arguments.against or _AGAINST, pace))
        except RuntimeError as error:  # torch has no memory for it
            raise InputError(f"{workload} does not run here: {str(error).partition(chr(10))[0]}") from error
        print(comparison_text(found[-1]), flush=True)
    return {"machine": describe(), "comparisons": found}


def _sizes(text: str) -> dict[str, int]:
    """Parse ``B=1,T=2048``."""
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        axis, _, number = part.partition("=")
        axis = axis.strip()
        if len(axis) != 1 or axis not in _AXES or not number.strip().isdecimal() or not 1 <= int(number) <= 2**31:
            raise InputError(f"--shape must be sizes such as B=1,T=2048,H=16,K=128 of {', '.join(_AXES)}; got {part!r}")
        sizes[axis] = int(number)
    heads, groups = sizes.get("H", 16), sizes.get("G", 0)
    if groups % heads:
        raise InputError(f"--shape must have G a multiple of H; got {groups} and {heads}")
    return sizes


def _target(path: Path, machine: dict[str, Any]) -> Path:
    from innerloop.bench.machine import file_name

    return path / file_name(machine) if path.is_dir() else path


def _write_page(path: Path, result: dict[str, Any]) -> None:
    from innerloop.bench.page import kept, page, pictures

    try:
        drawn = pictures(result)
    except ImportError as error:
        raise InputError(f"the page's figures need matplotlib: pip install 'innerloop[bench]' ({error})") from error
    from innerloop.files import write_text

    folder = path.absolute().parent / "images"
    folder.mkdir(exist_ok=True)
    for name, picture in drawn.items():
        write_text(folder / name, picture)
    write_text(path, page(result, kept(path.read_text(encoding="utf-8") if path.exists() else "")))
