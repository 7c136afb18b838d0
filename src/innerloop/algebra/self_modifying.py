"""Memories that make the keys, values and gates by which all of them are written, a mini-batch at a time.

What a token writes is fixed by the snapshots of the mini-batch's start, but the delta term acts on the weights as they
are, so the input weights of all memories solve one triangular system with their right-hand sides side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from innerloop.algebra.decay import running_products
from innerloop.algebra.mlp import activate, through_activation
from innerloop.algebra.solve import solve_unit_lower

ACTIVATION = "gelu_tanh"

Memory = tuple[Tensor, ...]
"""(W,), a linear map, or (W_in, W_out), ``[B, G, in, out]`` each; or ``[1, G, in, out]``, what all rows share."""


class Write(NamedTuple):
    """What tokens write, the same for all memories: ``[B, G, C, K]`` and ``[B, G, C]``."""

    k: Tensor
    v: Tensor
    rate: Tensor
    keep: Tensor


class Style(NamedTuple):
    """Which of the published and of our own variants run."""

    residual: bool
    normalized: bool
    everywhere: bool
    """Whether the delta term acts on output weights too."""


def unit(x: Tensor) -> Tensor:
    """Return x at length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def through(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x W``; where rows share the weight they go through it as one, forth and back."""
    if weight.shape[0] == x.shape[0]:
        return x @ weight
    rows, _, tokens, _ = x.shape
    return (x.transpose(0, 1).flatten(1, 2) @ weight[0]).unflatten(1, (rows, tokens)).transpose(0, 1)


def answer(memory: Memory, x: Tensor, residual: bool) -> Tensor:
    """Return ``x W`` or ``a(x W_in) W_out``, plus x if ``residual``."""
    return _answer(memory, x, through(x, memory[0]), residual)


def answers(memories: Sequence[Memory], x: Tensor, residuals: Sequence[bool]) -> list[Tensor]:
    """Return the same for each memory, by one product with their input weights side by side."""
    first, widths = _beside(memories)
    asked = through(x, first).split(widths, -1)
    return [_answer(memory, x, y, residual) for memory, y, residual in zip(memories, asked, residuals, strict=True)]


def _answer(memory: Memory, x: Tensor, y: Tensor, residual: bool) -> Tensor:
    if len(memory) == 2:
        y = through(activate(y, ACTIVATION), memory[1])
    return x + y if residual else y


def _beside(memories: Sequence[Memory]) -> tuple[Tensor, list[int]]:
    """Return the input weights side by side, and their widths."""
    weights = [memory[0] for memory in memories]
    rows = next((weight.shape[0] for weight in weights if weight.shape[0] != 1), 1)
    return torch.cat([w.expand(rows, -1, -1, -1) for w in weights], -1), [w.shape[-1] for w in weights]


def damping(rate: Tensor, snapshot: Memory, h: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the proximal step multiplies the rates of both layers by, ``[B, G, C]``, h the hidden layer."""
    norm = snapshot[1].square().sum((-2, -1))[..., None]
    return 1 / (1 + rate * norm), 1 / (1 + rate * h.square().sum(-1))


def write_block(
    memories: Sequence[Memory], snapshots: Sequence[Memory], residuals: Sequence[bool], write: Write, style: Style
) -> tuple[list[Memory], list[list[Tensor]], Tensor]:
    r"""Move every memory through C tokens.

    .. math::
        W \leftarrow (\alpha I - \eta k k^\top) W - \eta_1 k \delta^\top, \qquad
        W_{out} \leftarrow \alpha W_{out} - \eta_2 h \delta_{out}^\top

    Returns:
        The memories after the block; for each what its tokens have written, as ``read_block`` takes it; and the
        products of what is kept, ``[B, G, C, C]``.
    """
    k, v, rate, keep = write
    product = running_products(keep)  # [B, G, C, C]
    p = product[..., 0] * keep[..., :1]  # [B, G, C]
    earlier = torch.cat((torch.ones_like(p[..., :1]), p[..., :-1]), -1)
    shifted = torch.cat((torch.zeros_like(product[..., :1, :]), product[..., :-1, :]), -2)
    coupling = shifted * rate[..., None, :] * (k @ k.mT)
    start, widths = _beside(snapshots)
    at_k, at_v = through(torch.cat((k, v), -2), start).split(k.shape[-2], -2)
    said = zip(snapshots, residuals, at_k.split(widths, -1), at_v.split(widths, -1), strict=True)
    outputs, errors = zip(*(
        _errors(snapshot, z, y, k - v if residual else None, rate, style.normalized)
        for snapshot, residual, z, y in said
    ), strict=True)  # fmt: skip
    same = all(memory is snapshot for memory, snapshot in zip(memories, snapshots, strict=True))
    first = start if same else _beside(memories)[0]
    right = earlier[..., None] * (at_k if same else through(k, first)) + torch.cat(errors, -1)
    solved = solve_unit_lower(coupling, right)
    end, last = p[..., -1, None, None], (product[..., -1, :] * rate)[..., None]
    moved = (end * first - (last * k).mT @ solved).split(widths, -1)
    wrote = (rate[..., None] * solved).split(widths, -1)
    after, written = [], []
    for memory, output, ahead, found in zip(memories, outputs, moved, wrote, strict=True):
        if output is None:
            after.append((ahead,))
            written.append([found])
            continue
        h, error, damp = output
        left, right = _output_write(memory[1], h, error, damp, rate, shifted, earlier, style.everywhere)
        after.append((ahead, end * memory[1] - (last * left).mT @ right))
        written.append([found, left, rate[..., None] * right])
    return after, written, product


def _errors(
    snapshot: Memory, at_k: Tensor, at_v: Tensor, apart: Tensor | None, rate: Tensor, normalized: bool
) -> tuple[tuple[Tensor, Tensor, Tensor] | None, Tensor]:
    """Return what the output weights write by, if there are any, and the error at what comes of the input weights.

    ``at_k`` and ``at_v`` are what comes of them for k and v, ``apart`` is k - v where the memory adds its input.
    """
    if len(snapshot) == 1:
        error = at_k - at_v
        return None, error if apart is None else error + apart
    h = activate(at_k, ACTIVATION)
    error = through(h, snapshot[1]) - through(activate(at_v, ACTIVATION), snapshot[1])
    error = error if apart is None else error + apart
    first, second = damping(rate, snapshot, h) if normalized else (torch.ones_like(rate),) * 2
    inner = first[..., None] * through_activation(through(error, snapshot[1].mT), at_k, ACTIVATION)
    return (h, error, second), inner


def _output_write(
    weight: Tensor,
    h: Tensor,
    error: Tensor,
    damp: Tensor,
    rate: Tensor,
    shifted: Tensor,
    earlier: Tensor,
    everywhere: bool,
) -> tuple[Tensor, Tensor]:
    """Return l and r such that token s writes ``-rate l_s r_s^T`` into the output weights."""
    if not everywhere:
        return h, damp[..., None] * error
    length = (h.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    direction = h / length
    coupling = shifted * rate[..., None, :] * (direction @ direction.mT)
    right = earlier[..., None] * through(direction, weight) + damp[..., None] * length * error
    return direction, solve_unit_lower(coupling, right)


def read_block(
    memory: Memory, q: Tensor, k: Tensor, written: list[Tensor], product: Tensor, keep: Tensor, residual: bool
) -> Tensor:
    """Read one memory at every token, each after its own write; ``memory`` is that before the block."""
    p = (product[..., 0] * keep[..., :1])[..., None]
    x = p * through(q, memory[0]) - (product * (q @ k.mT)) @ written[0]
    if len(memory) == 2:
        x = activate(x, ACTIVATION)
        x = p * through(x, memory[1]) - (product * (x @ written[1].mT)) @ written[2]
    return q + x if residual else x
