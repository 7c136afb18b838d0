"""Attention that looks back a fixed number of tokens, and at learned ones that stay in sight."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from innerloop.arguments import check_count
from innerloop.nn.layer import Turn
from innerloop.nn.projections import Projection, heads
from innerloop.nn.rotary import check_rotary, frequencies_of, rotate


class Persistent(nn.Module):
    """Learned keys and values that every query sees: what is known of the task, not of the past."""

    def __init__(self, count: int, heads: int, width: int) -> None:
        """Draw."""
        super().__init__()
        check_count("persistent", count, 0)
        self.key = nn.Parameter(torch.empty(heads, count, width))
        self.value = nn.Parameter(torch.empty(heads, count, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw anew."""
        if self.key.is_meta:  # torch would load its compiler to draw none
            return
        nn.init.normal_(self.key, std=self.key.shape[-1] ** -0.5)
        nn.init.normal_(self.value, std=self.key.shape[-1] ** -0.5)


def attend(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, persistent: Persistent) -> Tensor:
    """Return attention of ``[..., H, L, K]`` queries over the keys that they see ``[..., L, S]``, and the learned."""
    key, value = (x.to(q.dtype).expand(*q.shape[:-3], -1, -1, -1) for x in (persistent.key, persistent.value))
    always = torch.ones((*sees.shape[:-1], key.shape[-2]), dtype=torch.bool, device=sees.device)
    mask = torch.cat((always, sees), -1).unsqueeze(-3)
    return F.scaled_dot_product_attention(q, torch.cat((key, k), -2), torch.cat((value, v), -2), attn_mask=mask)


class WindowAttention(nn.Module):
    """Causal attention over the last ``window`` tokens with rotary positions, in blocks of as many."""

    def __init__(self, width: int, heads: int, key_width: int, window: int, persistent: int) -> None:
        """Draw the weights."""
        super().__init__()
        check_rotary(key_width)
        check_count("window", window)
        self.heads, self.key_width, self.window = heads, key_width, window
        self.inputs = Projection(width, 3 * heads * key_width)
        self.persistent = Persistent(persistent, heads, key_width)

    def forward(self, x: Tensor, turn: Turn) -> Tensor:
        """Map ``[B, T, D]`` to ``[B, T, H * K]``; the turn keeps the last keys and values."""
        q, k, v = self.inputs(x).chunk(3, -1)
        frequencies, places = frequencies_of(self.key_width, 10_000.0, x.device), turn.positions()
        q, k = (rotate(heads(y, self.heads), places, frequencies).flatten(-2) for y in (q, k))
        row, place, owner, spot = turn.look_back("attention", torch.cat((k, v), -1), self.window)
        if place is not None:
            q = torch.zeros_like(row[..., : q.shape[-1]]).index_copy(1, place, q)
        else:
            q = F.pad(q, (0, 0, row.shape[1] - q.shape[1], 0))
        k, v = row.chunk(2, -1)
        o = self._blocks(q, k, v, owner, spot)
        return o[:, place] if place is not None else o[:, row.shape[1] - x.shape[1] :]

    def _blocks(self, q: Tensor, k: Tensor, v: Tensor, owner: Tensor, spot: Tensor) -> Tensor:
        """Attend in blocks of the window, each of which sees itself and the one before."""
        W, length = self.window, q.shape[1]
        behind = -length % W
        q, k, v = (F.pad(y, (0, 0, W, behind)) for y in (q, k, v))
        # What fills up belongs to nobody.
        owner, spot = (F.pad(y, (W, behind), value=-1) for y in (owner, spot))

        def blocks(y: Tensor) -> tuple[Tensor, Tensor]:
            own = y.unflatten(1, (-1, W))
            return own[:, 1:], torch.cat((own[:, :-1], own[:, 1:]), 2)

        (own_i, own_j), (spot_i, spot_j) = blocks(owner), blocks(spot)  # [B, M, W], [B, M, 2W]
        ago = spot_i[..., None] - spot_j[..., None, :]
        sees = (own_i[..., None] == own_j[..., None, :]) & (ago >= 0) & (ago < W) & (spot_j >= 0)[..., None, :]
        (q, _), (_, k), (_, v) = blocks(q), blocks(k), blocks(v)
        q, k, v = (heads(y, self.heads).transpose(-3, -2) for y in (q, k, v))  # [B, M, H, ., K]
        o = attend(q, k, v, sees | ~sees.any(-1, keepdim=True), self.persistent)
        return o.transpose(-3, -2).flatten(-2).flatten(1, 2)[:, :length]
