"""Memories whose channels fade apart: GLA, KDA, Gated DeltaNet-2, RWKV-7.

A decay by channel does not leave the inner products that it weighs, so it cannot be a matrix beside them as a scalar
one is. It goes into their operands here, by running products alone: factors in [0, 1], exact at 0 in value and
gradient, without a sum of logarithms or a quotient of decays.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from innerloop.algebra.chunks import stacked
from innerloop.algebra.solve import solve_unit_lower


def channel_additive_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, states: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    r"""Read ``o_t = S_t^T q_t`` of ``S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T`` for all chunks, ``[B, G, M, C, .]``.

    Yang et al. (2023), arXiv:2312.06635.

    Returns:
        ``o``, ``[B, G, M, C, V]``, and the memory after the last chunk.
    """
    products, reads, keys, ends = faded_products((q,), (k,), g.exp())
    (state,), starts = states, []
    for write, end in zip((keys[0].mT @ v).unbind(2), ends.unbind(2), strict=True):
        starts.append(state)
        state = end * state + write
    return reads[0] @ stacked(starts) + products[0][0] @ v, (state,)


def channel_delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run the delta family whose memory fades by channel; Kimi Team (2025), arXiv:2510.26692."""
    return _corrections(q, k, beta[..., None] * k, v, g, states)


def decoupled_delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, states: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run the delta family that erases at ``b * k``, writes at ``k``, and gates the value by channel with w."""
    return _corrections(q, b * k, k, w * v, g, states)


def _corrections(
    q: Tensor, erase: Tensor, write: Tensor, v: Tensor, g: Tensor, states: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    r"""Read the memory that adds ``write (v - S^T erase)^T`` to its faded self.

    .. math::
        (I + \mathrm{stril}\langle X, A \rangle) E = V - (X \circ p) S_0, \qquad
        O = (Q \circ p) S_0 + \langle Q, A \rangle E, \qquad S_1 = p_C \circ S_0 + (A \circ p_{>})^\top E

    Returns:
        ``o``, ``[B, G, M, C, V]``, and the memory after the last chunk.
    """
    products, (q, erase), (write,), ends = faded_products((q, erase), (write,), g.exp())
    (scores,), (coupling,) = products
    starts, updates, state = _solve_chunks(coupling, v, erase, write, ends, None, states[0])
    return q @ starts + scores @ updates, (state,)


def generalized_delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, kappa: Tensor, states: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    r"""Read the memory that fades, loses ``(a * kappa) (kappa^T S)`` of its unfaded self and adds ``k v^T``.

    What is erased at t is read at t - 1: kappa is a row one token earlier, and its products are shifted back.

    .. math::
        (I + \mathrm{stril}\langle B, A \rangle^{-}) E = -\mathrm{stril}\langle B, K \rangle^{-} V - (B \circ p^-) S_0,
        \qquad O = (Q \circ p) S_0 + \langle Q, A \rangle E + \langle Q, K \rangle V

    Peng et al. (2025), arXiv:2503.14456, transposed: their state is V by K.

    Returns:
        ``o``, ``[B, G, M, C, V]``, and the memory after the last chunk.
    """
    first, later = kappa.split([1, kappa.shape[-2] - 1], -2)
    early = torch.cat((later, torch.zeros_like(first)), -2)
    products, (q, early), (erase, k), ends = faded_products((q, early), (a * kappa, k), g.exp())
    scores, couplings = products
    coupling, wanted = (_one_later(x) for x in couplings)
    reads = torch.cat((first, early[..., :-1, :]), -2)
    starts, updates, state = _solve_chunks(coupling, -(wanted @ v), reads, erase, ends, k.mT @ v, states[0])
    return q @ starts + scores[0] @ updates + scores[1] @ v, (state,)


def _one_later(x: Tensor) -> Tensor:
    return torch.cat((torch.zeros_like(x[..., :1, :]), x[..., :-1, :]), -2)


def _solve_chunks(
    coupling: Tensor, wanted: Tensor, reads: Tensor, writes: Tensor, ends: Tensor, added: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the memory at every chunk's start, all corrections, and the memory after the last chunk."""
    starts, updates = [], []
    more = [None] * wanted.shape[2] if added is None else added.unbind(2)
    # Unbound, not sliced: the backward of a slice fills a whole gradient with zeros, for every chunk again.
    chunks = zip(*(x.unbind(2) for x in (coupling, wanted, reads, writes, ends)), more, strict=True)
    for pairs, value, read, write, end, more_ in chunks:
        starts.append(state)
        update = solve_unit_lower(pairs, value - read @ state)  # [B, G, C, V]
        updates.append(update)
        state = end * state + write.mT @ update
        state = state if more_ is None else state + more_
    return stacked(starts), stacked(updates), state


Operands = tuple[Tensor, ...]
BLOCK = 8
"""Tokens that run through a block one after another, for all blocks at once."""


def faded_products(
    rows: Operands, columns: Operands, keep: Tensor
) -> tuple[list[Operands], Operands, Operands, Tensor]:
    r"""Return the products of rows and columns whose channels fade on the way, and what reaches beyond the chunk.

    .. math:: \langle x_t, y_s \rangle = \sum_c x_{tc}\, y_{sc} \prod_{s < i \le t} w_{ic} \quad (s \le t)

    Blocks grow by pairs to the chunk. A row carries what is kept since its block's start, a column what is left at its
    block's end: the products between two neighbours are one matrix product. Joining them, the later rows fade by all
    that the earlier block keeps, the earlier columns by all that the later one does. No step takes more than T x K
    numbers, for all blocks of all chunks together.

    Args:
        rows: R tensors x, ``[..., C, K]``.
        columns: Y tensors y, ``[..., C, K]``.
        keep: What each token leaves of each channel, w in [0, 1], ``[..., C, K]``.

    Returns:
        R x Y products ``[..., C, C]``, 0 above the diagonal; the rows faded since the chunk's start; the columns faded
        to its end; and what the whole chunk keeps, ``[..., K, 1]``.
    """
    size = keep.shape[-2]
    full = 1 << (size - 1).bit_length()
    # Tokens that change nothing fill it up to a power of two.
    row, column, keep = (
        pad(x, (0, 0, 0, 0, 0, full - size), value=value) if full > size else x
        for x, value in ((torch.stack(rows, -2), 0.0), (torch.stack(columns, -2), 0.0), (keep[..., None, :], 1.0))
    )  # [..., C, R, K], [..., C, Y, K], [..., C, 1, K]
    pairs, row, column, keep = _within_blocks(*(x.unflatten(-3, (-1, min(BLOCK, full))) for x in (row, column, keep)))
    while keep.shape[-3] > 1:
        (early, late), (ahead, behind), (before, after), (first, second) = (
            x.unflatten(-3, (-1, 2)).unbind(-3) for x in (row, column, keep, pairs)
        )
        between = late @ ahead.mT
        upper = torch.cat((first, torch.zeros_like(between)), -1)
        pairs = torch.cat((upper, torch.cat((between, second), -1)), -2)
        row = torch.cat((early, late * before), -2)
        column = torch.cat((ahead * after, behind), -2)
        keep = before * after
    row, column = (
        x.squeeze(-3).unflatten(-2, (-1, len(of)))[..., :size, :, :].unbind(-2)
        for x, of in ((row, rows), (column, columns))
    )
    pairs = pairs.squeeze(-3).unflatten(-1, (-1, len(columns))).unflatten(-3, (-1, len(rows)))
    products = pairs[..., :size, :, :size, :]  # [..., C, R, C, Y]
    return [x.unbind(-1) for x in products.unbind(-3)], row, column, keep.squeeze(-3).mT


def _within_blocks(row: Tensor, column: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the products within blocks of c tokens ``[..., N, c, . K]``, and what leaves each block."""
    reach = row.shape[-3] * column.shape[-2]
    pairs, faded = [], []
    since, left = None, None
    for x, y, w in zip(row.unbind(-3), column.unbind(-3), keep.unbind(-3), strict=True):
        since = w if since is None else since * w
        left = y if left is None else torch.cat((left * w, y), -2)  # [..., N, t Y, K]
        found = x @ left.mT
        pairs.append(pad(found, (0, reach - found.shape[-1])))
        faded.append(x * since)
    assert since is not None and left is not None
    return torch.cat(pairs, -2), torch.cat(faded, -2), left, since
