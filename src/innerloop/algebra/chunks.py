"""Cut a sequence into chunks, all of them at once, and the rest behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

States = tuple[Tensor, ...]


def in_chunks(
    function: Callable[..., tuple[Tensor, States]], tokens: Sequence[Tensor | None], states: States, size: int
) -> tuple[Tensor, States]:
    """Run a family's chunk form over ``[B, T, G, ...]`` tokens .

    ``function(*chunked, states)`` sees all whole chunks as ``[B, G, M, C, ...]``, then the remaining tokens as one
    shorter chunk. Nothing is padded: not every rule has a token that leaves its memory alone.

    Returns:
        ``o``, ``[B, T, G, V]``, and the states after the last token.
    """
    first = next(token for token in tokens if token is not None)
    length = first.shape[1]
    whole = length // size * size
    outputs = []
    for start, stop in ((0, whole), (whole, length)):
        if start == stop:
            continue
        width = min(size, stop - start)
        pieces = [None if token is None else _chunked(token[:, start:stop], width) for token in tokens]
        out, states = function(*pieces, states)
        outputs.append(out.flatten(2, 3).transpose(1, 2))  # [B, T, G, V]
    return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0], states


def _chunked(token: Tensor, size: int) -> Tensor:
    return token.transpose(1, 2).unflatten(2, (-1, size))  # [B, G, M, C, ...]


def stacked(chunks: Sequence[Tensor]) -> Tensor:
    """Return ``[B, G, M, ...]`` of M chunks; one alone is not copied."""
    return chunks[0].unsqueeze(2) if len(chunks) == 1 else torch.stack(list(chunks), 2)
