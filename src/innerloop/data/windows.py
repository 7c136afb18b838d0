"""Every stretch of a token sequence, as views of it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Windows(NamedTuple):
    """Windows that start one token apart; each holds ``length`` inputs and, one further, as many targets."""

    train: Tensor
    """``[train, length + 1]``, the windows that start first."""
    validation: Tensor
    """``[validation, length + 1]``, those that follow."""


def windows(tokens: Tensor, length: int = 32, train: int = 50_000, validation: int = 5_000) -> Windows:
    """Return overlapping windows of ``tokens``, training ones first, without copying a token.

    Args:
        tokens: The sequence, ``[T]``.
        length: Inputs in a window; a window holds one token more, so that targets are its last ``length``.
        train: Number of windows to train on.
        validation: Number of windows after those.

    Returns:
        Two strided views of ``tokens``. Neighbouring windows share memory: read them, do not write into them.

    Raises:
        ValueError: If there are too few tokens.

    Example:
        >>> import torch
        >>> windows(torch.arange(7), length=3, train=2, validation=1).train.tolist()
        [[0, 1, 2, 3], [1, 2, 3, 4]]
    """
    wanted = train + validation + length
    if len(tokens) < wanted:
        raise ValueError(
            f"tokens must be at least train + validation + length = {wanted}; got {len(tokens)}. "
            "Ask for fewer windows or give a longer text."
        )
    every = tokens.unfold(0, length + 1, 1)  # [T - length, length + 1]
    return Windows(every[:train], every[train : train + validation])
