"""Train a language model on a text, in a folder that a stopped run goes on in.

The text is a file, a folder, a .jsonl or .parquet file, or a Hugging Face data set (hf:NAME).
"""

from __future__ import annotations

import argparse
import errno
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from innerloop.cli.bar import Bar
from innerloop.cli.errors import InputError
from innerloop.cli.progress import seconds_in_words
from innerloop.cli.values import (
    BYTES,
    check_column,
    filled,
    given_options,
    joined,
    one_line,
    parse_settings,
    path,
    quoted,
    settle_threads,
    vocabulary,
)

if TYPE_CHECKING:
    from innerloop.training import Plan, Run, Score, Update

NAME = "train"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("data", nargs="?", type=filled, metavar="TEXT",
                        help="file, folder or hf:NAME; left out with --resume")  # fmt: skip
    parser.add_argument("--out", type=path, metavar="DIR", help="folder of the run, which is made")
    parser.add_argument("--resume", type=path, metavar="DIR", help="go on with the run in DIR, as it was begun")
    data = parser.add_argument_group("text")
    data.add_argument("--column", metavar="NAME", help="of records, what holds the text; text")
    data.add_argument("--validation", type=filled, metavar="TEXT",
                      help="what to validate on; the end of TEXT if left out")  # fmt: skip
    data.add_argument("--hold-out", type=float, metavar="PART", help="how much of TEXT that end is; 0.1")
    data.add_argument("--tokenizer", choices=("bytes", "pairs"), help="bytes, or byte pairs learned; bytes")
    data.add_argument("--vocabulary", type=int, metavar="N", help="ids of the byte pairs; 2048")
    model = parser.add_argument_group("model")
    model.add_argument("--pattern", metavar="LAYERS", help="such as 3*gated_delta_rule+attention; gated_delta_rule")
    model.add_argument("--depth", type=int, metavar="N", help="layers in all: the pattern, repeated; its own number")
    model.add_argument("--width", type=int, metavar="N", help="256")
    model.add_argument("--heads", type=int, metavar="N", help="4")
    model.add_argument("--set", action="append", dest="model", metavar="NAME=VALUE",
                       help="another field of the model, such as dropout=0.1; may be given several times")  # fmt: skip
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, metavar="N", help="updates; 1000")
    training.add_argument("--batch", type=int, metavar="N", help="windows an update; 32")
    training.add_argument("--part", type=int, metavar="N", help="windows at once; the whole batch")
    training.add_argument("--length", type=int, metavar="N", help="tokens a window; 256")
    training.add_argument("--stride", type=int, metavar="N", help="from one window to the next; the length")
    training.add_argument("--rate", type=float, metavar="X", help="AdamW's, at its highest; 0.001")
    training.add_argument("--warmup", type=int, metavar="N", help="updates over which it rises; a twentieth of all")
    training.add_argument("--precision", choices=("float32", "bfloat16"), help="float32")
    training.add_argument("--seed", type=int, metavar="N", help="0")
    training.add_argument("--log-every", type=int, metavar="N", help="10")
    training.add_argument("--evaluate-every", type=int, metavar="N", help="100")
    training.add_argument("--save-every", type=int, metavar="N", help="100")
    training.add_argument("--train-set", action="append", dest="training", metavar="NAME=VALUE",
                          help="another option of training, such as clip=0.5 or weight_decay=0")  # fmt: skip
    training.add_argument("--tensorboard", action="store_true", help="log for TensorBoard too")
    training.add_argument("--threads", type=int, metavar="N", help="of torch; as many as it takes by itself")


def run(arguments: argparse.Namespace) -> int:
    """Train to the end, or until the first interrupt.

    Args:
        arguments: What :func:`add` declared.

    Returns:
        0; 1 if the run failed; 130 if it was interrupted.

    Raises:
        InputError: If an argument is wrong.
    """
    settle_threads()
    _check(arguments)
    from innerloop.training import Run

    try:
        found = Run.open(arguments.resume) if arguments.resume else _prepared(arguments)
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        raise InputError(one_line(error)) from error
    if found.plan.purpose != "training":
        raise InputError(f"--resume must name a run; {arguments.resume} is a comparison, for innerloop compare")
    return _train(found)


def _check(arguments: argparse.Namespace) -> None:
    given = {name: value for name, value in vars(arguments).items() if name not in ("command", "run", "resume")}
    if arguments.resume is not None:
        odd = [name for name, value in given.items() if value is not None and value is not False]
        if odd:
            raise InputError(f"--resume takes everything from the run; leave out {', '.join(sorted(odd))}")
        return
    if arguments.data is None:
        raise InputError("TEXT must be named, or a run by --resume DIR; got neither")
    if arguments.out is None:
        raise InputError("--out must name the folder of the run; got none")
    if arguments.validation is not None and arguments.hold_out is not None:
        raise InputError("--hold-out is the end of TEXT, which --validation takes the place of; leave one out")
    vocabulary(arguments)
    check_column(arguments, arguments.data, arguments.validation)


def _prepared(arguments: argparse.Namespace) -> Run:
    from innerloop.training import Run

    plan = _plan(arguments)
    bar = Bar(1.0, "encoding the text")
    try:
        return Run.prepare(arguments.out, plan, bar.reach)
    finally:
        bar.close()


def _plan(arguments: argparse.Namespace) -> Plan:
    from innerloop.lm import Config
    from innerloop.training import Plan, TrainingOptions

    model = given_options(arguments, "pattern", "depth", "width", "heads") | vocabulary(arguments)
    model = joined(model, parse_settings(arguments.model, Config, "--set"), "--set")
    names = ("steps", "batch", "part", "length", "stride", "rate", "warmup", "precision", "seed", "log_every",
             "evaluate_every", "save_every")  # fmt: skip
    training: dict[str, Any] = {"steps": 1000}
    training |= joined(given_options(arguments, *names), parse_settings(arguments.training, TrainingOptions,
                                                                        "--train-set"), "--train-set")  # fmt: skip
    if isinstance(training["steps"], int):
        training.setdefault("warmup", max(0, training["steps"] // 20))
    ids = 2048 if arguments.tokenizer == "pairs" else BYTES
    return Plan(
        place=arguments.data,
        config=Config(**{"vocab_size": ids, **model}),
        options=TrainingOptions(**training),
        board=arguments.tensorboard,
        **given_options(arguments, "column", "validation", "hold_out", "tokenizer", "threads"),
    )


def _train(run: Run) -> int:
    watch = _Screen()
    again = f"innerloop train --resume {quoted(run.folder)}"
    try:
        with _first_interrupt() as asked:
            step = run.train(watch, lambda: bool(asked))
    except FloatingPointError as error:
        kept = f"the checkpoint of step {run.step} is kept" if run.step else "there is no checkpoint"
        print(f"innerloop train: step {watch.step + 1}: {error}; {kept} in {quoted(run.folder)}, and --resume "
              "would end here again. Train anew with a lower --rate, once that folder is removed or with another "
              "--out",
              file=sys.stderr)  # fmt: skip
        return 1
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise InputError(f"{one_line(error)}; the run is not whole without it. Bring it back, or train anew with "
                             "another --out") from error  # fmt: skip
        # safetensors gives no number, and says so of writes alone.
        cure = "Make room" if error.errno in (None, errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "Mend that"
        print(f"innerloop train: {one_line(error)}; the checkpoint of step {run.step} is kept. "
              f"{cure}, then: {again}", file=sys.stderr)  # fmt: skip
        return 1
    except (ValueError, RuntimeError) as error:
        raise InputError(one_line(error)) from error
    finally:
        watch.close()
    if step < run.plan.options.steps:
        print(f"Interrupted: saved at step {step} of {run.plan.options.steps}. Go on with: {again}", file=sys.stderr)
        return 130
    print(f"Trained: step {step}. Read on with: innerloop generate {quoted(run.folder)} --prompt 'Once'")
    return 0


@contextmanager
def _first_interrupt() -> Generator[list[int], None, None]:
    """Lend a list that the first interrupt fills; the second one ends the process as usual."""
    asked: list[int] = []

    def note(number: int, frame: object) -> None:
        asked.append(number)
        signal.signal(number, before[signal.Signals(number)])
        print("\nStopping after this update; once more stops at once.", file=sys.stderr)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Screen:
    """Shows a run: loss, tokens a second, time left."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self.step = self._steps = self._tokens = 0
        self._pace = 0.0

    def begun(self, step: int, steps: int, tokens: int) -> None:
        self.step, self._steps, self._tokens = step, steps, tokens
        self._bar = Bar(steps, "training")
        self._bar.reach(step)

    def updated(self, step: int, update: Update, seconds: float) -> None:
        assert self._bar is not None
        self.step = step
        self._pace = seconds if not self._pace else 0.9 * self._pace + 0.1 * seconds
        self._bar.reach(step, self._words(update.loss, self._tokens / self._pace))

    def logged(self, step: int, loss: float, tokens_per_second: float) -> None:
        assert self._bar is not None
        self._bar.say(f"step {step}/{self._steps}{self._words(loss, tokens_per_second)}", always=False)

    def validated(self, step: int, score: Score) -> None:
        assert self._bar is not None
        self._bar.say(f"step {step}: validation loss {score.loss:.4f}, perplexity {score.perplexity:.2f}, "
                      f"{score.bits_per_byte:.3f} bits a byte")  # fmt: skip

    def saved(self, step: int) -> None:
        pass

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _words(self, loss: float, pace: float) -> str:
        left = seconds_in_words((self._steps - self.step) * self._pace)
        return f"  loss {loss:.4f}  {pace:,.0f} tokens/s  {left} left"
