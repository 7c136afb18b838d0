"""Softmax attention over a memory that keeps every pair."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from innerloop.shapes import align_heads

QUERIES = 1024
"""Queries that look at a given past together: bounds the mask at QUERIES x S."""


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


def attend(q: Tensor, k: Tensor, v: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return ``sum_s softmax_s(q_t . k_s) v_s`` over the past and the present, ``[B, T, G, V]``, and all pairs."""
    states = remember(k, v, states)
    keys, values, lengths = states
    heads = max(q.shape[-2], v.shape[-2])
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
