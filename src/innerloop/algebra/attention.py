"""Softmax attention over a memory that keeps every pair, or the newest."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from innerloop.shapes import align_heads

QUERIES = 1024
"""Queries that look at a given past together: bounds the mask at QUERIES x S."""
NEAR = 64
"""Queries that look back on a window together, or as many as the window has tokens."""


def remember(k: Tensor, v: Tensor, past: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Put ``[B, T, H, .]`` pairs behind the ``lengths`` pairs that each row keeps; what lies beyond is not read."""
    past_k, past_v, lengths = past
    if past_k.shape[1] == 0:
        return k, v, lengths + k.shape[1]
    place = lengths[:, None] + torch.arange(k.shape[1], device=k.device)  # [B, T]
    return _append(past_k, k, lengths, place), _append(past_v, v, lengths, place), lengths + k.shape[1]


def _append(past: Tensor, new: Tensor, lengths: Tensor, place: Tensor) -> Tensor:
    held = torch.arange(past.shape[1], device=past.device) < lengths[:, None]
    kept = past.masked_fill(~held[..., None, None], 0)
    room = torch.cat((kept, torch.zeros_like(new)), 1)
    return room.scatter(1, place[..., None, None].expand_as(new), new)


def recent(pairs: tuple[Tensor, ...], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keep each row's newest ``count`` pairs, or all if there are fewer."""
    k, v, lengths = pairs
    room = min(count, k.shape[1])
    kept = lengths.clamp(max=room)
    place = ((lengths - kept)[:, None] + torch.arange(room, device=k.device)).clamp(max=max(k.shape[1] - 1, 0))
    return _gathered(k, place), _gathered(v, place), kept


def _gathered(x: Tensor, place: Tensor) -> Tensor:
    return x.gather(1, place[..., None, None].expand(*place.shape, *x.shape[2:]))


def attend(
    q: Tensor, k: Tensor, v: Tensor, past: tuple[Tensor, ...], window: int = 0
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return ``sum_s softmax_s(q_t . k_s) v_s`` over the past and the present, ``[B, T, G, V]``, and all pairs.

    With a window, s runs over so many tokens, up to t itself.
    """
    states = remember(k, v, past)
    heads = max(q.shape[-2], v.shape[-2])
    if window:
        if not torch.compiler.is_compiling():  # no further back than there is anything; a compiler keeps one graph
            window = min(window, past[0].shape[1] + q.shape[1])
        q, k, v = (align_heads(x, heads).transpose(1, 2) for x in (q, k, v))
        return _attend_near(q, k, v, _before(past, heads, window - 1), window).transpose(1, 2), states
    keys, values, lengths = states
    q, keys, values = (align_heads(x, heads).transpose(1, 2) for x in (q, keys, values))  # [B, G, ., .]
    if keys.shape[-2] == q.shape[-2]:
        out = scaled_dot_product_attention(q, keys, values, is_causal=True, scale=1.0)
        return out.transpose(1, 2), states
    last = lengths[:, None] - q.shape[-2] + torch.arange(q.shape[-2], device=q.device)  # [B, T]: own place in the past
    outputs = []
    for queries, own in zip(q.split(QUERIES, -2), last.split(QUERIES, -1), strict=True):
        seen = torch.arange(keys.shape[-2], device=q.device) <= own[..., None]  # [B, T, S]
        outputs.append(scaled_dot_product_attention(queries, keys, values, attn_mask=seen[:, None], scale=1.0))
    return torch.cat(outputs, -2).transpose(1, 2), states


def _before(past: tuple[Tensor, ...], heads: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's newest ``count`` pairs, ``[B, G, count, .]`` with pads in front, and which are real."""
    k, v, lengths = past
    place = torch.arange(-count, 0, device=k.device) + lengths[:, None]
    real = place >= 0  # [B, W-1]
    if k.shape[1] == 0:
        k, v = (x.new_zeros((x.shape[0], 1, *x.shape[2:])) for x in (k, v))
    held = (_gathered(x, place.clamp(min=0)).masked_fill(~real[..., None, None], 0) for x in (k, v))
    k, v = (align_heads(x, heads).transpose(1, 2) for x in held)
    return k, v, real


def _attend_near(q: Tensor, k: Tensor, v: Tensor, before: tuple[Tensor, ...], window: int) -> Tensor:
    """Run blocks of queries over their own keys and the ``window - 1`` before them, ``[B, G, T, V]``."""
    *pairs, behind = before
    size, reach = max(window, NEAR), window - 1
    lengths = [min(size, q.shape[2] - start) for start in range(0, q.shape[2], size)]
    # Every token lies in one part, or in two where it is also in the next block's reach: split once, so that the
    # backward is linear in T.
    cuts = [part for n in lengths for part in ((n - reach, reach) if n > reach else (n,))]
    keys, values = (list(x.split(cuts, 2)) for x in (k, v))
    outputs = []
    for queries in q.split(lengths, 2):
        own = [[x.pop(0) for _ in range(2 if queries.shape[2] > reach else 1)] for x in (keys, values)]
        length = queries.shape[2]
        key, value = (torch.cat((old, *new), 2) for old, new in zip(pairs, own, strict=True))
        ahead = torch.arange(reach + length, device=q.device) - torch.arange(length, device=q.device)[:, None]
        seen = (ahead >= 0) & (ahead <= reach)  # [C, W-1+C]
        if not outputs:
            real = torch.cat((behind, behind.new_ones((len(behind), length))), 1)
            seen = (seen & real[:, None])[:, None]
        outputs.append(scaled_dot_product_attention(queries, key, value, attn_mask=seen, scale=1.0))
        pairs = [new[-1] for new in own]
    return torch.cat(outputs, 2)
