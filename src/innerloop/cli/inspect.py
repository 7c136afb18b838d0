"""Look inside: what each layer of a model, or a bare rule, wrote, forgot and returned, as JSON and figures."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from innerloop.cli.errors import InputError
from innerloop.cli.values import check_seed, filled, one_line, path, settle_threads

if TYPE_CHECKING:
    from innerloop.inspect import Trace

NAME = "inspect"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("target", type=filled, metavar="TARGET", help="folder of a model or run, or the name of a rule")
    parser.add_argument("--text", metavar="TEXT", help="for a model: what it reads")
    parser.add_argument("--sequence", type=path, metavar="FILE", help="for a rule: a safetensors file with q, k, v and "
                        "gates of one row; a recall with overwrites if left out")  # fmt: skip
    parser.add_argument("--gate", action="append", metavar="NAME=X", help="for a rule without --sequence: its gate, "
                        "at all tokens, such as beta=1 or g=-0.1")  # fmt: skip
    parser.add_argument("--seed", type=int, metavar="N", help="of that recall; 0")
    parser.add_argument("--most", type=int, default=128, metavar="N", help="tokens to look at, the first ones; 128")
    parser.add_argument("--out", type=path, default=Path("inspected"), metavar="DIR", help="folder to write; inspected")


def run(arguments: argparse.Namespace) -> int:
    """Trace, and write what was found.

    Args:
        arguments: What :func:`add` declared.

    Returns:
        0.

    Raises:
        InputError: If an argument is wrong.
    """
    if arguments.most < 1:
        raise InputError(f"--most must be at least 1; got {arguments.most}")
    check_seed(arguments)
    if arguments.out.exists() and not arguments.out.is_dir():
        raise InputError(f"--out must be a folder; got the file {arguments.out}. Name another")
    settle_threads()
    try:
        found = _model(arguments) if Path(arguments.target).is_dir() else {arguments.target: _rule(arguments)}
        arguments.out.mkdir(parents=True, exist_ok=True)
        written = _write(found, arguments.out)
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        raise InputError(one_line(error)) from error
    for name, trace in found.items():
        _tell(name, trace)
    print(f"\nKept as {', '.join(str(path) for path in written)}")
    return 0


def _model(arguments: argparse.Namespace) -> dict[str, Trace]:
    if not arguments.text:
        raise InputError("--text must say what the model reads; got none")
    for name in ("sequence", "gate", "seed"):
        if getattr(arguments, name) is not None:
            raise InputError(f"--{name} is for a rule; {arguments.target} is a model's folder")
    from innerloop.inspect import inspect_model
    from innerloop.training import load_model

    model, tokenizer = load_model(arguments.target)
    ids = tokenizer.encode(arguments.text)[: arguments.most]
    return inspect_model(model, ids[None], [tokenizer.decode([token]) for token in ids.tolist()])


def _rule(arguments: argparse.Namespace) -> Trace:
    from innerloop.inspect import trace
    from innerloop.rule import get, names

    if arguments.text:
        raise InputError(f"--text is for a model; {arguments.target} is no folder")
    if arguments.target not in names():
        raise InputError(f"TARGET must be a model's folder or one of {', '.join(names())}; got {arguments.target}")
    rule = get(arguments.target)
    if arguments.sequence is not None:
        for name in ("gate", "seed"):
            if getattr(arguments, name) is not None:
                raise InputError(f"--{name} is for a rule without --sequence, whose file holds all that is needed")
        return trace(rule, **_tensors(arguments.sequence, arguments.most))
    from innerloop.inspect.recall import recall

    return trace(rule, **recall(rule, _gates(arguments.gate), arguments.seed or 0, arguments.most))


def _tensors(path: Path, most: int) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(path)
    except SafetensorError as error:
        raise InputError(f"--sequence must be a safetensors file; {path}: {error}") from error
    if missing := {"q", "k", "v"} - set(found):
        raise InputError(f"--sequence must hold q, k and v; {path} lacks {', '.join(sorted(missing))}")
    length = found["q"].shape[1] if found["q"].ndim > 1 else 0
    return {name: x[:, :most] if x.ndim > 2 and x.shape[1] == length else x for name, x in found.items()}


def _gates(words: list[str] | None) -> dict[str, float]:
    found = {}
    for word in words or ():
        name, _, value = word.partition("=")
        if name in found:
            raise InputError(f"--gate must name each gate once; got {name} twice")
        try:
            found[name] = float(value)
        except ValueError:
            raise InputError(f"--gate must be NAME=NUMBER; got {word}") from None
    return found


def _write(found: dict[str, Trace], folder: Path) -> list[Path]:
    from innerloop import files

    written = [folder / "trace.json"]
    files.write_text(written[0], json.dumps({name: trace.to_dict() for name, trace in found.items()}) + "\n")
    if importlib.util.find_spec("matplotlib") is not None:
        from innerloop.cli.inspect_figure import drawn

        for name, trace in found.items():
            path = folder / f"{name}.svg"
            files.write_text(path, drawn(trace))
            written.append(path)
    if importlib.util.find_spec("jinja2") is not None:
        from innerloop.report.walk import Walk, write_walk

        for name, trace in found.items():
            path = folder / f"{name}.html"
            write_walk(Walk(f"{name}, token by token", trace.to_dict()), path)
            written.append(path)
    return written


def _tell(name: str, trace: Trace) -> None:
    print(f"{name}: {trace.rule}, {len(trace.tokens)} tokens")
    print(f"  {'head':<6}{'surprise':>10}{'written':>10}{'half-life':>11}{'rank':>8}  the last read returns")
    for head in range(len(trace.surprise)):
        life = trace.half_life[head].median().item()
        rank = "–" if trace.rank is None else f"{trace.rank[head, -1].item():.2f}"
        print(f"  {head:<6}{trace.surprise[head].mean().item():>10.3f}{trace.written[head].mean().item():>10.3f}"
              f"{life:>11.4g}{rank:>8}  {_returned(trace, head)}")  # fmt: skip


def _returned(trace: Trace, head: int) -> str:
    if trace.returned is None:
        return "–"
    place = int(trace.returned[head, -1])
    return repr(trace.tokens[place]) + f" at {place}" if place >= 0 else "nothing"
