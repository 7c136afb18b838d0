"""A run at one step, in a folder that is a model's as well: weights, tokenizer, moments, and where the run stood."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from innerloop import files, states
from innerloop.data import Tokenizer, load_tokenizer
from innerloop.lm import LanguageModel
from innerloop.training.learner import Learner

VERSION = 1
"""Of the folders that :meth:`Checkpoint.write` makes; :meth:`Checkpoint.read` takes no other."""
TOKENIZER = "tokenizer.json"
_FORMAT = "innerloop checkpoint"
_TRIES = 100  # of reading a checkpoint while a run puts newer ones in its place
_MOMENTS, _PROGRESS = "optimizer.safetensors", "progress.json"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass
class Checkpoint:
    """What a run needs besides weights and moments to go on as if it had never stopped."""

    step: int
    """Updates taken."""
    random: Tensor
    """The state of torch's generator."""
    progress: dict[str, Any]
    """What has been counted: see ``Run``."""

    def write(self, folder: Path, learner: Learner, tokenizer: Tokenizer) -> Path:
        """Write a folder in ``folder``, then remove older ones; whatever interrupts it, a whole one stays.

        Args:
            folder: The run's.
            learner: Its model and optimizer.
            tokenizer: What the model's tokens mean.

        Returns:
            The new folder.

        Raises:
            OSError: If it cannot be written; the older ones are as they were.
        """
        path = folder / f"step-{self.step:08d}"
        if not path.exists():
            with files.new_folder(path) as partial:
                learner.model.save(partial)
                tokenizer.save(partial / TOKENIZER)
                facts = {"format": _FORMAT, "version": VERSION, "step": self.step, "progress": self.progress}
                (partial / _PROGRESS).write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
                moments = {**learner.moments(), "random": self.random}
                states.write(partial / _MOMENTS, moments, {"format": _FORMAT, "version": str(VERSION)})
        for older in _all(folder):
            if older != path:
                shutil.rmtree(older)
        return path

    @classmethod
    def read(cls, path: Path, learner: Learner) -> Checkpoint:
        """Put a checkpoint's weights and moments into a learner.

        Args:
            path: The folder.
            learner: Of a model of the same configuration.

        Returns:
            The rest of it.

        Raises:
            ValueError: If the folder is another model's, of another version or damaged.
            OSError: If a file is missing.
        """
        facts = _facts(path / _PROGRESS)
        saved = _loaded(path)
        if saved.config != learner.model.config:
            raise ValueError(f"{path} must hold the run's model; its configuration is another")
        metadata, moments = states.read(path / _MOMENTS)
        if metadata.get("format") != _FORMAT or metadata.get("version") != str(VERSION) or "random" not in moments:
            raise ValueError(f"{path / _MOMENTS} must be written by innerloop, version {VERSION}; it is something else")
        random = moments.pop("random")
        learner.model.load_state_dict(saved.state_dict())
        learner.set_moments(moments)
        return cls(step=facts["step"], random=random, progress=facts["progress"])

    @classmethod
    def now(cls, step: int, progress: dict[str, Any]) -> Checkpoint:
        """Take down where torch's generator stands."""
        return cls(step=step, random=torch.get_rng_state(), progress=progress)


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint in a run's folder, None if there is none."""
    found = _all(folder)
    return found[-1] if found else None


def find(folder: str | os.PathLike[str]) -> Path:
    """Return the folder of a model: a run's newest checkpoint, or the folder itself.

    Args:
        folder: A run, a checkpoint, or what ``LanguageModel.save`` wrote together with a tokenizer.

    Returns:
        The folder that holds ``config.json``.

    Raises:
        ValueError: If there is no model.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"the model must be the folder of a run or a checkpoint; got {folder}, which is "
                         f"{'a file' if folder.exists() else 'not there'}")  # fmt: skip
    if (folder / "config.json").is_file():
        return folder
    checkpoint = newest(folder)
    if checkpoint is not None:
        return checkpoint
    words = "has no checkpoint yet" if (folder / "run.json").is_file() else "holds no model"
    raise ValueError(f"the model must be the folder of a run or a checkpoint; {folder} {words}")


def load_model(folder: str | os.PathLike[str]) -> tuple[LanguageModel, Tokenizer]:
    """Load a model to evaluate, and its tokenizer.

    Args:
        folder: A run, a checkpoint, or what ``LanguageModel.save`` wrote together with a tokenizer.

    Returns:
        The model, in evaluation mode, and the tokenizer.

    Raises:
        ValueError: If there is no model, or it is damaged, of another version, or has weights that are not finite.
        OSError: If a file is missing.
        RuntimeError: If the tokenizer needs a package that is missing.
    """
    for _ in range(_TRIES):
        path = find(folder)
        try:
            return _read(path)
        except (OSError, ValueError):
            if find(folder) == path:  # nobody has put a newer one in its place meanwhile
                raise
    raise ValueError(f"{folder} is trained so fast that its checkpoints cannot be read; name a copy of one")


def _read(path: Path) -> tuple[LanguageModel, Tokenizer]:
    tokenizer = load_tokenizer(path / TOKENIZER)
    model = _loaded(path).eval()
    if len(tokenizer) != model.config.vocab_size:
        raise ValueError(f"the tokenizer in {path} must have vocab_size={model.config.vocab_size} ids; "
                         f"got {len(tokenizer)}")  # fmt: skip
    return model, tokenizer


def _loaded(path: Path) -> LanguageModel:
    """Return the model in a folder; ValueError if one of its weights is not finite."""
    model = LanguageModel.load(path)
    odd = [name for name, p in model.named_parameters() if not bool(p.isfinite().all())]
    if odd:
        more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        raise ValueError(f"the weights in {path} must be finite; {odd[0]}{more} holds NaN or infinity")
    return model


def _all(folder: Path) -> list[Path]:
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _facts(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text("utf-8"))
        ours = stored["format"] == _FORMAT
        version, step, progress = stored["version"], stored["step"], stored["progress"]
    except (ValueError, KeyError, TypeError):
        ours, version, step, progress = False, None, None, None
    if not ours:
        raise ValueError(f"{path} must be written by innerloop; it is damaged or something else")
    if version != VERSION:
        raise ValueError(f"{path} must have version {VERSION}; got {version}. "
                         "Resume with the release of innerloop that wrote it")  # fmt: skip
    named = _NAME.fullmatch(path.parent.name)
    if type(step) is not int or not isinstance(progress, dict) or (named and step != int(named[1])):
        raise ValueError(f"{path} must say at which step it is; it is damaged")
    return {"step": step, "progress": progress}
