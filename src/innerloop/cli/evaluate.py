"""Say how well a trained model predicts a text: perplexity, bits a byte, bits a character.

The state is carried from a document's beginning to its end, however long it is.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from innerloop.cli.bar import Bar
from innerloop.cli.errors import InputError
from innerloop.cli.values import check_column, filled, one_line, path, settle_threads

if TYPE_CHECKING:
    from torch import Tensor

    from innerloop.data import Tokenizer
    from innerloop.training import Score

NAME = "evaluate"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("model", type=path, metavar="RUN", help="folder of a run or of a checkpoint")
    parser.add_argument("data", nargs="?", type=filled, metavar="TEXT",
                        help="file, folder or hf:NAME; what the run validates on")  # fmt: skip
    parser.add_argument("--column", metavar="NAME", help="of records, what holds the text; text")
    parser.add_argument("--piece", type=int, default=1024, metavar="N", help="tokens at once; 1024")
    parser.add_argument("--window", type=int, metavar="N", help="forget the state after N tokens; never if left out")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the score.

    Args:
        arguments: What :func:`add` declared.

    Returns:
        0.

    Raises:
        InputError: If an argument is wrong.
    """
    for name in ("piece", "window"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise InputError(f"--{name} must be at least 1; got {value}")
    if arguments.data is None and arguments.column is not None:
        raise InputError("--column is for TEXT, of which none is named; leave it out")
    settle_threads()
    check_column(arguments, arguments.data)
    try:
        score = _score(arguments)
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        raise InputError(one_line(error)) from error
    numbers = {
        "tokens": score.tokens, "bytes": score.bytes, "characters": score.characters, "loss": score.loss,
        "perplexity": score.perplexity, "bits_per_byte": score.bits_per_byte,
        "bits_per_character": score.bits_per_character,
    }  # fmt: skip
    if arguments.json:
        print(json.dumps(numbers, indent=1))
        return 0
    for name, value in numbers.items():
        print(f"{name.replace('_', ' '):<20} {value:>14,}" if isinstance(value, int) else
              f"{name.replace('_', ' '):<20} {value:>14.4f}")  # fmt: skip
    return 0


def _score(arguments: argparse.Namespace) -> Score:
    from innerloop.data.sources import size
    from innerloop.training import evaluate, load_model

    model, tokenizer = load_model(arguments.model)
    documents, total = _documents(arguments, tokenizer)
    if arguments.data is not None:
        total = size(arguments.data)
    bar = Bar(total or 1, "evaluating")
    try:
        score = evaluate(
            model, tokenizer, documents, piece=arguments.piece, window=arguments.window,
            progress=lambda score: bar.reach(score.bytes if total else 0, f"  loss {score.loss:.4f}"),
        )  # fmt: skip
    finally:
        bar.close()
    if not score.tokens:
        raise ValueError("data must hold at least two tokens; a document's first one is not predicted")
    if not math.isfinite(score.nats):
        raise ValueError(f"the model's loss must be finite; got {score.nats}. Its weights are of no use")
    return score


def _documents(arguments: argparse.Namespace, tokenizer: Tokenizer) -> tuple[Iterable[Iterable[Tensor]], int | None]:
    """Return the documents, and how many bytes they have as far as that is known before."""
    from innerloop.data import encoded, fingerprint
    from innerloop.training import Run

    if arguments.data is not None:
        return encoded(arguments.data, arguments.column or "text", tokenizer), None
    folder = arguments.model
    for place in (folder, folder.parent):
        if (place / "run.json").is_file():
            run = Run.open(place)
            if fingerprint(run.tokenizer) != fingerprint(tokenizer):
                raise ValueError(f"TEXT must be named: {folder} has another tokenizer than the run in {place}")
            held = run.tokens.piece(run.tokens.split, run.tokens.count)
            if len(held) and int(held.max()) >= len(tokenizer):
                raise ValueError(f"the tokens in {run.tokens.folder} must be below {len(tokenizer)}; got "
                                 f"{int(held.max())}. They are damaged: train anew, or name a TEXT")  # fmt: skip
            return [[held]], int(tokenizer.byte_counts[held.numpy()].sum())
    raise ValueError(f"TEXT must be named: {folder} is no run, which would know what it validates on")
