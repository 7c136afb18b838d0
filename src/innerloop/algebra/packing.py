"""Several sequences in one row: take them apart, run them, put them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

States = tuple[Tensor, ...]


def run_packed(
    function: Callable[[Sequence[Tensor | None], States], tuple[Tensor, States]],
    tokens: Sequence[Tensor | None],
    states: States,
    bounds: Sequence[int],
) -> tuple[Tensor, States]:
    """Run ``function(tokens, states)`` on every sequence ``bounds[n]:bounds[n+1]`` of ``[1, T, ...]`` tokens.

    Sequences of equal length run as one batch. Tokens outside of all sequences are never read; their outputs are 0.

    Returns:
        ``o``, ``[1, T, G, V]``, and the states after each sequence.
    """
    lengths: dict[int, list[int]] = {}
    for n in range(len(bounds) - 1):
        lengths.setdefault(bounds[n + 1] - bounds[n], []).append(n)
    device = states[0].device
    # One permutation for all batches, not a gather for each: the backward stays linear in T.
    order = torch.tensor(
        [bounds[n] + t for length, members in lengths.items() for n in members for t in range(length)],
        dtype=torch.int64,
        device=device,
    )
    shapes = [(len(members), length) for length, members in lengths.items()]
    batches = [_apart(token, order, shapes) for token in tokens]
    outputs, finals = [], []
    for index, members in enumerate(lengths.values()):
        rows = torch.tensor(members, device=device)
        out, after = function([batch[index] for batch in batches], tuple(state[rows] for state in states))
        outputs.append(out.flatten(0, 1))
        finals.append(after)
    total = next(token.shape[1] for token in tokens if token is not None)
    rows = torch.tensor([n for members in lengths.values() for n in members], device=device).argsort()
    return _together(outputs, order, total), tuple(_same_length(parts)[rows] for parts in zip(*finals, strict=True))


def _apart(token: Tensor | None, order: Tensor, shapes: list[tuple[int, int]]) -> list[Tensor | None]:
    if token is None:
        return [None] * len(shapes)
    parts = token[0][order].split([rows * length for rows, length in shapes])
    return [part.view(*shape, *part.shape[1:]) for part, shape in zip(parts, shapes, strict=True)]


def _together(outputs: list[Tensor], order: Tensor, total: int) -> Tensor:
    place = torch.full((total,), len(order), device=order.device)
    place[order] = torch.arange(len(order), device=order.device)
    outside = outputs[0].new_zeros((1, *outputs[0].shape[1:]))
    return torch.cat([*outputs, outside])[place][None]


def _same_length(parts: Sequence[Tensor]) -> Tensor:
    """Join states over rows; those that grow with their sequence are filled up with zeros."""
    if parts[0].ndim < 2:
        return torch.cat(list(parts))
    longest = max(part.shape[1] for part in parts)
    return torch.cat([with_room(part, longest) for part in parts])


def with_room(state: Tensor, room: int) -> Tensor:
    """Return ``[N, S, ...]`` with so many places, zeros behind those that were there."""
    missing = room - state.shape[1]
    if missing <= 0:
        return state[:, :room] if missing else state
    return torch.cat((state, state.new_zeros((state.shape[0], missing, *state.shape[2:]))), 1)
