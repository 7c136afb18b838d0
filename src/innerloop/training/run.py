"""A training run in a folder of its own, which whatever stops it leaves fit to go on."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Generator
from pathlib import Path

import torch

from innerloop import files
from innerloop.data import (
    ByteTokenizer,
    PairTokenizer,
    Tokenizer,
    Tokens,
    fingerprint,
    load_tokenizer,
    texts,
    write_tokens,
)
from innerloop.threads import threads
from innerloop.training.checkpoint import TOKENIZER, newest
from innerloop.training.log import check_board
from innerloop.training.plan import Plan
from innerloop.training.session import Session, Watch

VERSION = 1
"""Of the folders that :meth:`Run.prepare` makes; :meth:`Run.open` takes no other."""
_FORMAT = "innerloop run"
_FACTS, _TOKENS, _LOCK = "run.json", "tokens", ".lock"
_ORDER = (_TOKENS, TOKENIZER, _FACTS)  # without the last one it is no run


class Run:
    """A plan, its text as tokens, and what training has made so far."""

    def __init__(self, folder: Path, plan: Plan, tokens: Tokens, tokenizer: Tokenizer) -> None:
        """Take what :meth:`prepare` made or :meth:`open` found."""
        self.folder, self.plan, self.tokens, self.tokenizer = folder, plan, tokens, tokenizer

    @classmethod
    def prepare(
        cls, folder: str | os.PathLike[str], plan: Plan, progress: Callable[[float], None] = lambda fraction: None
    ) -> Run:
        """Make a run's folder, with the text as tokens; nothing is left of it if that fails.

        Args:
            folder: To be made; it may be there and empty, and is filled in its place then.
            plan: What is to be trained.
            progress: Called with the fraction of the text that is encoded.

        Returns:
            The run.

        Raises:
            ValueError: If the text is missing, empty, too short or no text.
            FileExistsError: If the folder holds something.
            RuntimeError: If a package is missing.
            OSError: If a file cannot be read or written.
        """
        folder = Path(os.path.realpath(folder))
        if folder.exists() and not (folder.is_dir() and files.unfilled(folder, _ORDER)):
            raise FileExistsError(f"{folder} must be empty or not exist yet; it holds something")
        if plan.board:
            check_board()
        with _made(folder) as partial:
            tokenizer = _learned(plan)
            tokens = write_tokens(
                partial / _TOKENS, plan.place, tokenizer, column=plan.column, validation=plan.validation,
                hold_out=plan.hold_out, progress=progress,
            )  # fmt: skip
            _check_enough(tokens, plan)
            tokenizer.save(partial / TOKENIZER)
            facts = {"format": _FORMAT, "version": VERSION, "tokens": fingerprint(tokenizer), "plan": plan.to_dict()}
            (partial / _FACTS).write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
        return cls.open(folder)

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Run:
        """Find a run to go on with.

        Args:
            folder: What :meth:`prepare` made.

        Returns:
            The run.

        Raises:
            ValueError: If the folder is no run's, or of another version.
            OSError: If a file is missing.
            RuntimeError: If the tokenizer needs a package that is missing.
        """
        folder = Path(os.path.realpath(folder))
        if not (folder / _FACTS).is_file():
            raise ValueError(f"a run must be a folder with a {_FACTS}; {folder} "
                             f"{'has none' if folder.exists() else 'is not there'}")  # fmt: skip
        plan = _read_plan(folder / _FACTS)
        return cls(folder, plan, Tokens.open(folder / _TOKENS), load_tokenizer(folder / TOKENIZER))

    def train(self, watch: Watch, stop: Callable[[], bool] = lambda: False) -> int:
        """Train to the end, or until ``stop`` says so, from wherever the newest checkpoint is.

        On the CPU and as many threads, the weights, moments and logged losses are those of a run that never stopped, to
        the bit. torch's generator and number of threads are afterwards what they were.

        Args:
            watch: Told how it goes.
            stop: Asked after every update.

        Returns:
            The step of the checkpoint that it ended with: ``plan.options.steps`` if there was nothing to stop it.

        Raises:
            FloatingPointError: If the loss is not finite; the newest checkpoint is as it was.
            RuntimeError: If another process is training this run, or a package is missing.
            ValueError: If the newest checkpoint is damaged or of another version.
            OSError: If a file cannot be written; the newest checkpoint is as it was.
        """
        assert self.plan.threads is not None
        with locked(self.folder / _LOCK), torch.random.fork_rng(devices=[]), threads(self.plan.threads):
            files.remove_leftovers(self.folder)
            session = Session(self.folder, self.plan, self.tokens, self.tokenizer, watch)
            with contextlib.closing(session):
                return session.train(stop)

    @property
    def step(self) -> int:
        """Of the newest checkpoint, 0 if there is none."""
        found = newest(self.folder)
        return 0 if found is None else int(found.name.partition("-")[2])


@contextlib.contextmanager
def _made(folder: Path) -> Generator[Path, None, None]:
    """Lend what becomes the run's folder, or fills the empty one that is there; a failure leaves all as it was."""
    if folder.exists():
        with files.filled_folder(folder, _ORDER) as partial:
            yield partial
        return
    with files.folders_above(folder):
        files.remove_leftovers(folder.parent, folder.name)
        with files.new_folder(folder) as partial:
            yield partial


@contextlib.contextmanager
def locked(path: Path) -> Generator[None, None, None]:
    """Keep other processes from training here; RuntimeError if one does. Its end, however it comes, frees the lock."""
    try:
        import fcntl
    except ImportError:  # not every system has it
        yield
        return
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"{path.parent} is being trained by another process; wait for it or stop it") from None
        yield


def _learned(plan: Plan) -> Tokenizer:
    tokenizer = ByteTokenizer()
    if plan.tokenizer == "pairs":
        tokenizer = PairTokenizer.learn(texts(plan.place, plan.column), plan.config.vocab_size)
    if len(tokenizer) != plan.config.vocab_size:
        raise ValueError(f"vocab_size must be that of the tokenizer, {len(tokenizer)}; got {plan.config.vocab_size}")
    return tokenizer


def _check_enough(tokens: Tokens, plan: Plan) -> None:
    options = plan.options
    if tokens.training_windows(options.length, options.window_stride) < 1:
        raise ValueError(f"data must have at least length + 1 = {options.length + 1} tokens to train on; "
                         f"got {tokens.split}. Give a longer text or a smaller length")  # fmt: skip
    judged = plan.purpose == "comparison" or plan.validation is not None
    if judged and not len(tokens.validation(options.length, 1)):
        raise ValueError(f"data must hold out a window of {options.length + 1} tokens; got "
                         f"{tokens.count - tokens.split}. Validate on more or take a smaller length")  # fmt: skip


def _read_plan(path: Path) -> Plan:
    try:
        stored = json.loads(path.read_text("utf-8"))
        if stored["format"] != _FORMAT:
            raise ValueError
        version, plan = stored["version"], stored["plan"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} must be written by innerloop; it is damaged or something else") from None
    if version != VERSION or isinstance(version, bool):
        raise ValueError(f"{path} must have version {VERSION}; got {version}. "
                         "Resume with the release of innerloop that wrote it")  # fmt: skip
    try:
        return Plan.from_dict(plan)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} must be a plan: {error}") from None
