"""Train layers on a task and see what they hold and compute: a table and a figure.

Every row is kept in DIR/rows, so that a second call runs only what is missing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from innerloop.cli.errors import InputError
from innerloop.cli.row_loop import Rows
from innerloop.cli.values import given_options, joined, one_line, parse_settings, path, settle_threads

if TYPE_CHECKING:
    from innerloop.data.tasks import Task
    from innerloop.probe import Board, Contender, Row

NAME = "probe"
_BUDGET = {"steps": 1000, "batch": 64, "rate": 3e-3, "width": 64, "heads": 2, "depth": 1}


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("task", nargs="?", metavar="TASK", help="such as mqar, parity, words; --list names all")
    parser.add_argument("--layer", action="append", dest="layers", metavar="NAME", help="a pattern such as delta_rule "
                        "or mamba2+attention, or FILE.py:NAME of your own; once a layer")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="name the tasks, their sizes and their chance levels")
    parser.add_argument("--out", type=path, metavar="DIR", help="folder for rows, table and figure; probe-TASK")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="rows a layer; 3")
    parser.add_argument("--set", action="append", dest="sizes", metavar="NAME=VALUE", help="a size of the task, such "
                        "as pairs=16")  # fmt: skip
    parser.add_argument("--longer", type=int, nargs="+", default=[], metavar="N", help="judge at N times the "
                        "training's length as well, such as 2 4 16")  # fmt: skip
    budget = parser.add_argument_group("budget")
    for name, default in _BUDGET.items():
        kind = type(default)
        budget.add_argument(f"--{name}", type=kind, metavar="X" if kind is float else "N",
                            help=f"{default:g}")  # fmt: skip
    budget.add_argument("--budget", action="append", metavar="NAME=VALUE", help="another number of the budget: clip, "
                        "enough, feed_forward, judged")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Run the rows that are missing, then write table and figure.

    Args:
        arguments: What :func:`add` declared.

    Returns:
        0; 1 if a row failed; 130 if it was interrupted.

    Raises:
        InputError: If an argument is wrong.
    """
    if not arguments.list:
        _check(arguments)
    settle_threads()
    if arguments.list:
        return _list()
    try:
        board = _board(arguments)
        contenders = _contenders(arguments, board)
        board = board.at(board.folder, board.plan)
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        raise InputError(one_line(error)) from error
    return _run(board, [(chosen, seed) for chosen in contenders for seed in range(arguments.seeds)])


def _check(arguments: argparse.Namespace) -> None:
    if arguments.task is None:
        raise InputError("TASK must be named; innerloop probe --list describes them")
    if not arguments.layers:
        raise InputError("--layer must name at least one layer, such as delta_rule or FILE.py:NAME; got none")
    if arguments.seeds < 1:
        raise InputError(f"--seeds must be at least 1; got {arguments.seeds}")
    for factor in arguments.longer:
        if factor < 1:
            raise InputError(f"--longer must be at least 1; got {factor}")


def _list() -> int:
    from dataclasses import fields

    from innerloop.data.tasks import TASKS
    from innerloop.probe.summary import stated

    for name, kind in TASKS.items():
        made = kind()
        sizes = ", ".join(f"{field.name}={getattr(made, field.name)}" for field in fields(made))
        print(f"{name:<11} {(kind.__doc__ or '').partition(chr(10))[0]}\n{'':<11} {sizes}\n{'':<11} {stated(made)}")
    return 0


def _board(arguments: argparse.Namespace) -> Board:
    """Return the board that was asked for, without touching the disk."""
    from innerloop.probe import Board, Budget, Plan

    given = given_options(arguments, *_BUDGET)
    settings = parse_settings(arguments.budget, Budget, "--budget")
    budget: dict[str, Any] = {**_BUDGET, **joined(given, settings, "--budget")}
    factors = tuple(sorted({1, *arguments.longer}))
    task = _task(arguments)
    for factor in factors:
        task.longer(factor)
    return Board(arguments.out or Path(f"probe-{task.name}"), Plan(task, Budget(**budget), factors))


def _task(arguments: argparse.Namespace) -> Task:
    from innerloop.data.tasks import TASKS, task

    if arguments.task not in TASKS:
        raise InputError(f"TASK must be one of {', '.join(TASKS)}; got {arguments.task}")
    return task(arguments.task, **parse_settings(arguments.sizes, TASKS[arguments.task], "--set"))


def _contenders(arguments: argparse.Namespace, board: Board) -> list[Contender]:
    from innerloop.probe import contender

    budget = board.plan.budget
    names = list(dict.fromkeys(arguments.layers))
    return [contender(name, budget.width, budget.heads, budget.depth) for name in names]


def _run(board: Board, wanted: list[tuple[Contender, int]]) -> int:
    from innerloop.probe import markdown, summarised

    task = board.plan.task

    def figure(rows: list[list[Row]]) -> str:
        from innerloop.cli.probe_figure import drawn

        return drawn(rows, task)

    return Rows(
        command=NAME, title="probing", folder=board.folder, named=lambda chosen: chosen.name, row=board.row, said=_said,
        summarised=summarised, table=lambda summaries: markdown(summaries, task), figure=figure,
    ).run(wanted)  # fmt: skip


def _said(row: Row) -> str:
    last = ", ".join(f"{value:.3f} at {factor}x" for factor, value in row.last.items())
    return f"score {row.scores['1']:.3f}, last answer {last}"
