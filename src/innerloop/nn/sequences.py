"""Which token follows which: rows of a batch, or sequences that lie one behind the other in one row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from innerloop.algebra.convolution import behind, own
from innerloop.shapes import readable


class Sequences(NamedTuple):
    """How the tokens of ``[B, T, ...]`` make sequences."""

    bounds: Tensor | None
    """``[N+1]`` where N of them are packed in one row; None where every row is one."""

    def lengths(self, x: Tensor) -> Tensor | int:
        """Return how many tokens each sequence has: ``[N]``, or one number for all."""
        return x.shape[1] if self.bounds is None else self.bounds.diff()

    def positions(self, x: Tensor, start: Tensor) -> Tensor:
        """Return each token's place in its sequence, ``[B, T]``, which was at ``start`` ``[N]`` before this call."""
        place = torch.arange(x.shape[1], device=x.device)
        if self.bounds is None:
            return start[:, None] + place
        mine = own(self.bounds, x.shape[1]).clamp(min=0)
        return (start[mine] + place - self.bounds[mine])[None]

    def behind(self, past: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Put the W tokens ``[N, W, C]`` that came before it in front of each sequence of ``x``."""
        return behind(past, x, self.bounds)


class Packed(NamedTuple):
    """Where the real tokens of a padded batch, or of a row with slack, have gone, and the way back."""

    sequences: Sequences
    order: Tensor | None
    """Of a padded batch's B * T tokens: the real ones first, row by row."""
    real: Tensor | None
    """``[B, T]``, None if all are."""

    def pack(self, x: Tensor) -> Tensor:
        """Return ``[B, T, ...]`` with pads emptied, so that whatever they hold reaches nothing, and taken out."""
        if self.real is not None:
            x = x.masked_fill(~self.real.view(*self.real.shape, *(1,) * (x.ndim - 2)), 0)
        return x if self.order is None else x.flatten(0, 1)[self.order][None]

    def unpack(self, y: Tensor) -> Tensor:
        """Return ``y`` in the shape that came, 0 at pads."""
        if self.order is not None and self.real is not None:
            back = torch.empty_like(self.order)
            back[self.order] = torch.arange(len(self.order), device=y.device)
            y = y[0][back].unflatten(0, self.real.shape)
        return y if self.real is None else y.masked_fill(~self.real.view(*self.real.shape, *(1,) * (y.ndim - 2)), 0)


def arrange(x: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None) -> Packed:
    """Say which tokens of ``[B, T, ...]`` make sequences; boundaries given beside a mask of ones win."""
    # Shapes depend on shapes alone, so that a compiler sees one graph for all masks.
    if cu_seqlens is not None:
        place = torch.arange(x.shape[1], device=x.device)
        real = (place >= cu_seqlens[0]) & (place < cu_seqlens[-1])
        return Packed(Sequences(cu_seqlens), None, real[None])
    if attention_mask is None or (readable(attention_mask) and bool(attention_mask.all())):
        return Packed(Sequences(None), None, None)
    real = attention_mask.bool()
    order = torch.argsort(~real.flatten(), stable=True)
    bounds = torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0))
    return Packed(Sequences(bounds), order, real)
