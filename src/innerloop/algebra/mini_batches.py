"""Cut sequences where their mini-batches end, which may be elsewhere in every row.

A solver that takes its gradient where a mini-batch began sees a sequence as pieces of mini-batches. Rows that stand at
one place of theirs are cut together. Rows that do not are moved so that they do: tokens that change nothing (``real``
is 0) fill up what is left free, and shapes depend on shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

State = Any
"""A tuple of tensors, or of such tuples."""

Block = Callable[..., tuple[Tensor, State]]
"""``block(pieces, state, real, place)``: tokens ``[B, G, C, ...]`` of one mini-batch, from its ``place`` on."""


class Grid(NamedTuple):
    """Where tokens lie once every row begins at place 0 of a mini-batch."""

    source: Tensor
    """Which token of the flat ``[B * T]`` stands there, ``[N, width]``; any where none does."""
    real: Tensor
    """Whether one does, ``[N, width]``."""
    back: Tensor
    """Where in the flat ``[N * width]`` each token of ``[B, T]`` has gone; any if it belongs to no sequence."""
    inside: Tensor | None
    """Which tokens of ``[B, T]`` belong to a sequence; None if all do."""
    lengths: Tensor
    """Tokens of each row, ``[N]``."""


def make_grid(rows: int, length: int, width: int, offsets: Tensor, bounds: Tensor | None) -> Grid:
    """Lay out rows of tokens, or the sequences between ``bounds`` of one row, ``offsets`` ``[N]`` behind place 0."""
    device = offsets.device
    place, time = torch.arange(width, device=device) - offsets[:, None], torch.arange(length, device=device)
    if bounds is None:
        first = torch.arange(rows, device=device)[:, None] * length
        lengths = torch.full((rows,), length, device=device)
        back = torch.arange(rows, device=device)[:, None] * width + offsets[:, None] + time
        inside = None
    else:
        first, lengths = bounds[:-1, None], bounds.diff()
        own = (torch.searchsorted(bounds, time, right=True) - 1).clamp(0, bounds.shape[0] - 2)
        back = (own * width + offsets[own] + time - bounds[own])[None].clamp(0, bounds.shape[0] * width - width)
        inside = ((time >= bounds[0]) & (time < bounds[-1]))[None]
        back = torch.where(inside, back, 0)
    real = (place >= 0) & (place < lengths[:, None])
    return Grid(torch.where(real, first + place, 0), real, back, inside, lengths)


def onto(grid: Grid, token: Tensor, neutral: float) -> Tensor:
    """Return ``[B, T, ...]`` as ``[N, width, ...]``, ``neutral`` where there is no token."""
    placed = token.flatten(0, 1)[grid.source]
    return torch.where(_like(grid.real, placed), placed, neutral)


def back_from(grid: Grid, out: Tensor) -> Tensor:
    """Return ``[N, width, ...]`` as ``[B, T, ...]``, 0 outside of all sequences."""
    found = out.flatten(0, 1)[grid.back]
    return found if grid.inside is None else torch.where(_like(grid.inside, found), found, 0)


def _like(mask: Tensor, x: Tensor) -> Tensor:
    return mask.view(*mask.shape, *(1,) * (x.ndim - mask.ndim))


def chosen(mask: Tensor, new: State, old: State) -> State:
    """Return ``new`` in the rows of ``mask`` ``[N]`` and ``old`` in the others, tensor by tensor."""
    if isinstance(new, Tensor):
        return torch.where(_like(mask, new), new, old)
    return tuple(chosen(mask, x, y) for x, y in zip(new, old, strict=True))


def run_blocks(
    block: Block,
    turn: Callable[[State, int], State],
    tokens: Sequence[Tensor],
    state: State,
    *,
    place: int,
    sizes: tuple[int, ...],
    limit: int,
    grid: Grid | None = None,
) -> tuple[Tensor, State]:
    """Run ``block`` over ``[B, T, G, ...]`` tokens, in pieces of at most ``limit`` that end where mini-batches do.

    A solver may have mini-batches of several sizes at once; ``turn(state, i)`` is what the end of one of ``sizes[i]``
    makes of a state. All rows begin at ``place``; with a ``grid`` they do so by tokens that are not real, and an end
    that lies beyond a row's tokens is none.

    Returns:
        ``o``, ``[B, T, G, ...]``, and the state after the last token.
    """
    lengths = cut(tokens[0].shape[1], place, sizes, limit)
    pieces = zip(*(token.transpose(1, 2).split(lengths, 2) for token in tokens), strict=True)  # [B, G, C, ...]
    reals = [None] * len(lengths) if grid is None else grid.real.to(tokens[0].dtype)[:, None].split(lengths, 2)
    outputs, done = [], 0
    for piece, real, length in zip(pieces, reals, lengths, strict=True):
        out, state = block(piece, state, real, place + done)
        outputs.append(out)
        done += length
        for index, size in enumerate(sizes):
            if (place + done) % size == 0:
                turned = turn(state, index)
                state = turned if grid is None else chosen(grid.real[:, done - 1], turned, state)
    return torch.cat(outputs, 2).transpose(1, 2), state


def cut(length: int, place: int, sizes: Sequence[int], limit: int) -> list[int]:
    """Return the lengths of the pieces."""
    lengths, end = [], place + length
    while place < end:
        lengths.append(min(end - place, limit, *(size - place % size for size in sizes)))
        place += lengths[-1]
    return lengths
