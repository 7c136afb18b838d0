"""A memory whose every entry fades at a pace of its own: no product of matrices, many chunks side by side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from innerloop.algebra.chunks import stacked
from innerloop.algebra.delta import proximal_rate
from innerloop.algebra.implicit import must_stay_open

TOGETHER = 2**16
"""Entries of memories that one operation works on: with fewer the calls cost most, with more the cache is left."""

Steps = list[tuple[Tensor, ...]]


def diagonal_chunks(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, states: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    r"""Read ``S_t = S_{t-1} * (1 - (k_t * k_t) e_t^T) + k_t (e_t * v_t)^T``, ``e = beta / (1 + beta |k|^2)``.

    The decay between two tokens is another one in each of the K V entries of the memory, so that no product of keys
    with queries says what one token reads of another. Chunks run side by side instead: C steps of all of them at
    once give what each makes of a memory, a walk over the chunks gives the memory where each starts, and C steps
    more read. That is twice the arithmetic of the token loop in T / M as many calls; where one memory fills the
    cache, M is 1, the first half falls away and the token loop is what remains. A backward pass keeps one memory for
    every M chunks and computes the others again: O(T K V) arithmetic, O(T K V / (C M) + C M K V) memory.

    Returns:
        ``o``, ``[B, G, M, C, V]``, and the memory after the last chunk.
    """
    (state,) = states
    rate = proximal_rate(beta, k.square().sum(-1, keepdim=True))  # [B, G, M, C, V]
    size = max(1, TOGETHER // max(1, state.numel()))
    run = _read if must_stay_open() else _Reads.apply
    outputs = []
    for queries, keys, paces, new in zip(*(x.split(size, 2) for x in (q, k, rate, rate * v)), strict=True):
        out, state = run(queries, keys, paces, new, state)
        outputs.append(out)
    return torch.cat(outputs, 2), (state,)


def _read(q: Tensor, k: Tensor, rate: Tensor, write: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return what all tokens of M chunks read, and the memory after the last."""
    steps = _steps(q, k, rate, write)
    memory, after = _starts(steps, state)
    outputs = []
    for query, key, pace, new in steps:
        memory = torch.addcmul(key * new, _fade(key, pace), memory)  # [B, G, M, K, V]
        outputs.append(query.mT @ memory)
    return torch.cat(outputs, -2), memory[:, :, -1] if after is None else after


def _steps(q: Tensor, k: Tensor, rate: Tensor, write: Tensor) -> Steps:
    """Return query, key, pace and what is written, for every step of all chunks, as columns and rows."""
    columns = (x[..., None].unbind(3) for x in (q, k))  # [B, G, M, K, 1]
    rows = (x[..., None, :].unbind(3) for x in (rate, write))  # [B, G, M, 1, V]
    return list(zip(*columns, *rows, strict=True))


def _fade(key: Tensor, pace: Tensor) -> Tensor:
    return torch.addcmul(key.new_ones(()), key * key, pace, value=-1)


def _starts(steps: Steps, state: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the memory where each chunk starts, and after the last; None for that of one chunk alone."""
    if steps[0][0].shape[2] == 1:
        return state[:, :, None], None
    keep = made = None
    for _, key, pace, new in steps:
        fade = _fade(key, pace)
        keep = fade if keep is None else fade * keep
        made = key * new if made is None else torch.addcmul(key * new, fade, made)
    assert keep is not None and made is not None
    starts = []
    for kept, added in zip(keep.unbind(2), made.unbind(2), strict=True):
        starts.append(state)
        state = torch.addcmul(added, kept, state)
    return stacked(starts), state


def _slopes(steps: Steps, grads: tuple[Tensor, ...], end: Tensor) -> Tensor:
    """Return the gradient of the memory after each chunk, given that of the reads and of the last memory."""
    if steps[0][0].shape[2] == 1:
        return end[:, :, None]
    keep = made = None
    for (query, key, pace, _), grad in zip(reversed(steps), reversed(grads), strict=True):
        fade = _fade(key, pace)
        keep = fade if keep is None else fade * keep
        made = fade * (query * grad) if made is None else fade * torch.addcmul(made, query, grad)
    assert keep is not None and made is not None
    ends = []
    for kept, added in zip(reversed(keep.unbind(2)), reversed(made.unbind(2)), strict=True):
        ends.append(end)
        end = torch.addcmul(added, kept, end)
    return stacked(ends[::-1])


class _Reads(torch.autograd.Function):
    """``_read`` with a backward that keeps nothing but where the first chunk starts."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, rate: Tensor, write: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return _read(q, k, rate, write, state)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:  # ruff: ignore[any-type] - the framework's own
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:  # ruff: ignore[any-type] - the framework's own
        if not torch.is_grad_enabled():
            return _pull(*ctx.saved_tensors, *grads)
        inputs = [x.view_as(x) for x in ctx.saved_tensors]
        inputs = [x if x.requires_grad else x.requires_grad_() for x in inputs]
        return torch.autograd.grad(_read(*inputs), inputs, grads, create_graph=True)


def _pull(
    q: Tensor, k: Tensor, rate: Tensor, write: Tensor, state: Tensor, grad: Tensor, end: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of ``_read``: the memories of these chunks again, then all chunks backwards at once."""
    steps = _steps(q, k, rate, write)
    memory, _ = _starts(steps, state)
    memories = [memory]
    for _, key, pace, new in steps:
        memories.append(torch.addcmul(key * new, _fade(key, pace), memories[-1]))
    grads = grad[..., None, :].unbind(3)  # [B, G, M, 1, V]
    slope = _slopes(steps, grads, end).clone()
    columns, rows = [], []
    for query, key, pace, new in reversed(steps):
        read = grads[len(steps) - 1 - len(rows)]
        after, before = memories.pop(), memories[-1]
        slope.addcmul_(query, read)  # [B, G, M, K, V]: of the memory after this token
        faded = slope * before
        of_key = slope @ new.mT - 2 * key * (faded @ pace.mT)
        columns.append(torch.cat((after @ read.mT, of_key), -1))
        rows.append(torch.cat((-(key * key).mT @ faded, key.mT @ slope), -2))
        slope *= _fade(key, pace)
    of_q, of_k = torch.stack(columns[::-1], 3).unbind(-1)
    of_rate, of_write = torch.stack(rows[::-1], 3).unbind(-2)
    return of_q, of_k, of_rate, of_write, slope[:, :, 0]
