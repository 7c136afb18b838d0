"""Reads the command line and hands over to one command."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from innerloop._version import __version__
from innerloop.cli import bench, compare, doctor, evaluate, explain, generate, inspect, probe, reproduce, rules, train
from innerloop.cli.errors import InputError, Parser
from innerloop.cli.values import escaped

COMMANDS = (reproduce, train, evaluate, generate, compare, probe, inspect, rules, explain, bench, doctor)
"""Modules with a ``NAME``, an ``add(parser)`` for its arguments and a ``run(arguments)`` that returns the exit code."""


def main(words: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        words: The arguments after the program's name; those of the process if omitted.

    Returns:
        The exit code: 0 done, 1 something failed, 2 wrong input, 130 interrupted.
    """
    parser = _parser()
    arguments = parser.parse_args(words)
    if arguments.run is None:
        parser.print_help()
        return 0
    _show_everything()
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except InputError as error:
        print(f"innerloop {arguments.command}: {escaped(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"innerloop {arguments.command}: interrupted", file=sys.stderr)
        return 130
    except OSError as error:  # standard output is full, or whoever reads it has left
        # What is still unwritten would raise once more when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"innerloop {arguments.command}: {error}", file=sys.stderr)
        return 1


def _show_everything() -> None:
    """Let what an output's encoding has no bytes for be written as an escape, rather than end the command."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="innerloop", description="Sequence layers that learn while they run.")
    parser.add_argument("--version", action="version", version=f"innerloop {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for module in COMMANDS:
        summary = (module.__doc__ or "").partition("\n")[0]
        command = commands.add_parser(module.NAME, help=summary, description=summary)
        module.add(command)
        command.set_defaults(run=module.run)
    return parser
