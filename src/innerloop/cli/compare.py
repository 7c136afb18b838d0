"""Compare layers on a text of your own at one budget, over several seeds: a table and a figure.

Every row is kept in DIR/rows, so that a second call runs only what is missing.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from innerloop.cli.bar import Bar
from innerloop.cli.errors import InputError
from innerloop.cli.row_loop import Rows
from innerloop.cli.values import (
    BYTES,
    check_column,
    filled,
    given_options,
    joined,
    one_line,
    parse_settings,
    path,
    settle_threads,
    vocabulary,
)

if TYPE_CHECKING:
    from innerloop.training import Plan
    from innerloop.training.scoreboard import Comparison, Row

NAME = "compare"
_OF_A_RUN = ("seed", "log_every", "evaluate_every", "save_every")  # of TrainingOptions


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("data", type=filled, metavar="TEXT", help="file, folder or hf:NAME")
    parser.add_argument("--out", type=path, required=True, metavar="DIR", help="folder for rows, table and figure")
    parser.add_argument("--layers", nargs="+", metavar="LAYERS", help="patterns, such as gated_delta_rule "
                        "3*kda+attention; every layer if left out")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="rows a layer; 3")
    parser.add_argument("--column", metavar="NAME", help="of records, what holds the text; text")
    parser.add_argument("--hold-out", type=float, default=0.1, metavar="PART", help="end of TEXT to judge on; 0.1")
    parser.add_argument("--tokenizer", choices=("bytes", "pairs"), default="bytes", help="bytes")
    parser.add_argument("--vocabulary", type=int, metavar="N", help="ids of the byte pairs; 2048")
    model = parser.add_argument_group("models")
    model.add_argument("--width", type=int, metavar="N", help="128")
    model.add_argument("--heads", type=int, metavar="N", help="4")
    model.add_argument("--depth", type=int, metavar="N", help="layers in all; 2, or the pattern's if longer")
    model.add_argument("--set", action="append", dest="model", metavar="NAME=VALUE", help="as innerloop train's")
    training = parser.add_argument_group("budget")
    training.add_argument("--steps", type=int, metavar="N", help="updates a row; 300")
    training.add_argument("--batch", type=int, metavar="N", help="windows an update; 32")
    training.add_argument("--length", type=int, metavar="N", help="tokens a window; 128")
    training.add_argument("--rate", type=float, metavar="X", help="0.001")
    training.add_argument("--threads", type=int, metavar="N", help="of torch; a comparison goes on with its own")
    training.add_argument("--train-set", action="append", dest="training", metavar="NAME=VALUE",
                          help="another option of training, such as clip=0.5")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Run the rows that are missing, then write table and figure.

    Args:
        arguments: What :func:`add` declared.

    Returns:
        0; 1 if a row failed; 130 if it was interrupted.

    Raises:
        InputError: If an argument is wrong.
    """
    if arguments.seeds < 1:
        raise InputError(f"--seeds must be at least 1; got {arguments.seeds}")
    vocabulary(arguments)
    settle_threads()
    check_column(arguments, arguments.data)
    from innerloop.lm.kinds import KINDS
    from innerloop.training.scoreboard import Comparison

    patterns = list(dict.fromkeys(arguments.layers or KINDS))
    bar = Bar(1.0, "encoding the text")
    try:
        plan = _plan(arguments)
        for pattern in patterns:  # all of them, before anything is written
            replace(plan.config, pattern=pattern, depth=None)
        comparison = Comparison.at(arguments.out, plan, bar.reach)
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        raise InputError(one_line(error)) from error
    finally:
        bar.close()
    return _run(comparison, [(pattern, seed) for pattern in patterns for seed in range(arguments.seeds)])


def _plan(arguments: argparse.Namespace) -> Plan:
    from innerloop.lm import Config
    from innerloop.training import Plan, TrainingOptions

    training: dict[str, Any] = {"steps": 300, "length": 128, "evaluate_windows": 1 << 30}
    settings = parse_settings(arguments.training, TrainingOptions, "--train-set")
    training |= joined(given_options(arguments, "steps", "batch", "length", "rate"), settings, "--train-set")
    if isinstance(training["steps"], int):
        training.setdefault("warmup", max(0, training["steps"] // 20))
    fields = parse_settings(arguments.model, Config, "--set")
    for option, given, names in (("--set", fields, ("pattern",)), ("--train-set", settings, _OF_A_RUN)):
        if odd := [name for name in names if name in given]:
            raise InputError(f"{option} {odd[0]} has no meaning in a comparison; leave it out")
    model: dict[str, Any] = {"width": 128, "heads": 4, "depth": 2}
    model["vocab_size"] = 2048 if arguments.tokenizer == "pairs" else BYTES
    model |= joined(given_options(arguments, "width", "heads", "depth") | vocabulary(arguments), fields, "--set")
    return Plan(
        place=arguments.data, column=arguments.column or "text", hold_out=arguments.hold_out,
        tokenizer=arguments.tokenizer, config=Config(**model), options=TrainingOptions(**training),
        threads=arguments.threads, purpose="comparison",
    )  # fmt: skip


def _run(comparison: Comparison, wanted: list[tuple[str, int]]) -> int:
    from innerloop.training.scoreboard import markdown, summarised

    def figure(rows: list[list[Row]]) -> str:
        from innerloop.cli.scoreboard_figure import drawn

        return drawn([summarised(found) for found in rows])

    return Rows(
        command=NAME, title="comparing", folder=comparison.run.folder, named=str, row=comparison.row, said=_said,
        summarised=summarised, table=markdown, figure=figure, earlier=comparison.others(wanted),
    ).run(wanted)  # fmt: skip


def _said(row: Row) -> str:
    return f"perplexity {row.perplexity:.2f}, {row.bits_per_character:.4f} bits a character"
