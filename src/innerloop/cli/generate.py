"""Let a trained model write, character by character as they come."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from innerloop.cli.errors import InputError
from innerloop.cli.values import check_seed, one_line, path, settle_threads

if TYPE_CHECKING:
    from innerloop.data import Tokenizer
    from innerloop.lm import LanguageModel

NAME = "generate"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("model", type=path, metavar="RUN", help="folder of a run or of a checkpoint")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="what to go on from; - reads it from the input")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="how many to write; 200")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0 takes the likeliest; 0.8")
    parser.add_argument("--top-k", type=int, metavar="N", help="draw from the N likeliest alone")
    parser.add_argument("--top-p", type=float, metavar="X", help="draw from the likeliest with this chance together")
    parser.add_argument("--seed", type=int, metavar="N", help="the same words each time; drawn if left out")


def run(arguments: argparse.Namespace) -> int:
    """Write to the output, the prompt first.

    Args:
        arguments: What :func:`add` declared.

    Returns:
        0.

    Raises:
        InputError: If an argument is wrong.
    """
    if arguments.tokens < 0:
        raise InputError(f"--tokens must be at least 0; got {arguments.tokens}")
    check_seed(arguments)
    settle_threads()
    from innerloop.training import load_model

    try:
        model, tokenizer = load_model(arguments.model)
        prompt = _read_input() if arguments.prompt == "-" else arguments.prompt
        pieces = _written(model, tokenizer, prompt, arguments)
    except (ValueError, RuntimeError, OSError) as error:
        raise InputError(one_line(error)) from error
    sys.stdout.write(prompt)
    try:
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
    except RuntimeError as error:  # chances that are none, of logits that are not finite
        raise InputError(one_line(error)) from error
    finally:
        sys.stdout.write("\n")
    return 0


def _read_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"the input must be UTF-8 text; byte {error.start} is not") from None


def _written(
    model: LanguageModel, tokenizer: Tokenizer, prompt: str, arguments: argparse.Namespace
) -> Iterator[str]:
    import torch

    from innerloop.data import SEPARATOR

    given = tokenizer.encode(prompt)
    if not len(given):
        given = torch.tensor([SEPARATOR])  # a document's beginning
    generator = torch.Generator()
    if arguments.seed is None:
        generator.seed()
    else:
        generator.manual_seed(arguments.seed)
    ids = model.generate(
        given[None], max_new_tokens=arguments.tokens, temperature=arguments.temperature, top_k=arguments.top_k,
        top_p=arguments.top_p, stop=(SEPARATOR,), generator=generator,
    )  # fmt: skip
    return tokenizer.decode_stream(int(token) for token in ids)
