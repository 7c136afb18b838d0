"""Memories that make the keys, values and gates by which all of them are written, a mini-batch at a time.

What a token writes is fixed by the snapshots of the mini-batch's start, but the delta term acts on the weights as they
are, so the input weights of all memories solve one triangular system with their right-hand sides side by side.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from innerloop.algebra.decay import running_products
from innerloop.algebra.mlp import activate, through_activation
from innerloop.algebra.solve import solve_unit_lower

ACTIVATION = "gelu_tanh"

Memory = tuple[Tensor, ...]
"""(W,), a linear map, or (W_in, W_out), ``[B, G, in, out]`` each."""


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


def answer(memory: Memory, x: Tensor, residual: bool) -> Tensor:
    """Return ``x W`` or ``a(x W_in) W_out``, plus x if ``residual``."""
    y = x @ memory[0]
    if len(memory) == 2:
        y = activate(y, ACTIVATION) @ memory[1]
    return x + y if residual else y


def damping(rate: Tensor, snapshot: Memory, h: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the proximal step multiplies the rates of both layers by, ``[B, G, C]``, h the hidden layer."""
    norm = snapshot[1].square().sum((-2, -1))[..., None]
    return 1 / (1 + rate * norm), 1 / (1 + rate * h.square().sum(-1))


def write_block(
    memories: list[Memory], snapshots: list[Memory], residuals: list[bool], write: Write, style: Style
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
    outputs, rights, firsts = [], [], []
    for memory, snapshot, residual in zip(memories, snapshots, residuals, strict=True):
        z = k @ snapshot[0]
        if len(snapshot) == 1:
            error = z - v @ snapshot[0]
            error = error + k - v if residual else error
            outputs.append(None)
        else:
            h = activate(z, ACTIVATION)
            error = h @ snapshot[1] - answer(snapshot, v, False)
            error = error + k - v if residual else error
            first, second = damping(rate, snapshot, h) if style.normalized else (torch.ones_like(rate),) * 2
            outputs.append((h, error, second))
            error = first[..., None] * through_activation(error @ snapshot[1].mT, z, ACTIVATION)
        rights.append(earlier[..., None] * (k @ memory[0]) + error)
        firsts.append(rights[-1].shape[-1])
    solved = solve_unit_lower(coupling, torch.cat(rights, -1)).split(firsts, -1)
    end, last = p[..., -1, None, None], (product[..., -1, :] * rate)[..., None]
    after, written = [], []
    for memory, found, output in zip(memories, solved, outputs, strict=True):
        moved = [end * memory[0] - (last * k).mT @ found]
        wrote = [rate[..., None] * found]
        if output is not None:
            h, error, second = output
            left, right = _output_write(memory[1], h, error, second, rate, shifted, earlier, style.everywhere)
            moved.append(end * memory[1] - (last * left).mT @ right)
            wrote += [left, rate[..., None] * right]
        after.append(tuple(moved))
        written.append(wrote)
    return after, written, product


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
    right = earlier[..., None] * (direction @ weight) + damp[..., None] * length * error
    return direction, solve_unit_lower(coupling, right)


def read_block(
    memory: Memory, q: Tensor, k: Tensor, written: list[Tensor], product: Tensor, keep: Tensor, residual: bool
) -> Tensor:
    """Read one memory at every token, each after its own write; ``memory`` is that before the block."""
    p = (product[..., 0] * keep[..., :1])[..., None]
    x = p * (q @ memory[0]) - (product * (q @ k.mT)) @ written[0]
    if len(memory) == 2:
        x = activate(x, ACTIVATION)
        x = p * (x @ memory[1]) - (product * (x @ written[1].mT)) @ written[2]
    return q + x if residual else x
