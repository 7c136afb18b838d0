"""The definition: one token after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def token_loop(
    step: Callable[..., tuple[Tensor, tuple[Tensor, ...]]],
    tokens: Sequence[Tensor | None],
    states: tuple[Tensor, ...],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Apply ``step(*token, states)`` to ``[B, T, G, ...]`` tokens in order; T is at least 1."""
    length = next(token.shape[1] for token in tokens if token is not None)
    # Unbound, not indexed: the backward of x[:, t] fills a whole gradient with zeros, for every token again.
    columns = [[None] * length if token is None else token.unbind(1) for token in tokens]
    outputs = []
    for token in zip(*columns, strict=True):
        out, states = step(*token, states)
        outputs.append(out)
    return torch.stack(outputs, 1), states
