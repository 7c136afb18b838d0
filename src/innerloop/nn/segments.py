"""Memory as context: attention inside segments, over what a memory recalls of all earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from innerloop import ops
from innerloop.algebra.deep_momentum import momentum_block
from innerloop.algebra.mlp import apply_mlp
from innerloop.algebra.self_modifying import unit
from innerloop.kernels.portable import full_precision
from innerloop.network_call import Started, per_row, run_sequence, widened
from innerloop.nn.layer import Turn
from innerloop.nn.norms import RMSNorm
from innerloop.nn.projections import Projection, heads
from innerloop.nn.rotary import check_rotary, frequencies_of, rotate
from innerloop.nn.window_attention import Persistent, attend
from innerloop.rules.titans import RULE, TitansState
from innerloop.shapes import compute_dtype

if TYPE_CHECKING:
    from innerloop.nn.titans import Titans


class SegmentMemory(nn.Module):
    r"""Attention over [learned | recalled | segment], whose output y is written; what comes out is y gated by M(y).

    The memory recalls at the weights of the segment's start; y is written token by token, and read after its write.
    """

    def __init__(self, width: int, heads: int, key_width: int, segment: int, persistent: int) -> None:
        """Draw the weights."""
        super().__init__()
        check_rotary(key_width)
        self.heads, self.key_width, self.segment = heads, key_width, segment
        inner = heads * key_width
        self.inputs, self.recall = Projection(width, 3 * inner), Projection(width, inner)
        self.recalled, self.write = Projection(inner, 2 * inner), Projection(inner, 3 * inner)
        self.persistent = Persistent(persistent, heads, key_width)
        self.norm = RMSNorm(key_width)

    def forward(self, x: Tensor, turn: Turn, layer: Titans) -> Tensor:
        """Map ``[B, T, D]`` to ``[B, T, H, K]``."""
        dtype = compute_dtype(x.dtype)
        q, k, v = (heads(y, self.heads) for y in self.inputs(x).chunk(3, -1))
        frequencies, places = frequencies_of(self.key_width, 10_000.0, x.device), turn.positions()
        q, k = rotate(q, places, frequencies), rotate(k, places, frequencies)
        tokens = [q, k, v, unit(heads(self.recall(x), self.heads))]
        past = turn.past
        if past is None:
            first = per_row(widened(layer.first(), dtype), turn.rows)
            memory = first, first, tuple(torch.zeros_like(w) for w in first)
            held = x.new_zeros((turn.rows, self.heads, self.segment, 4 * self.key_width), dtype=dtype)
        else:
            memory = widened(tuple(past.memory[:3]), dtype)
            held = heads(turn.held("segment", (self.segment, 4 * self.heads * self.key_width)), self.heads)
            held = held.transpose(1, 2).to(dtype)
        started = Started(
            RULE, (*memory, held), None if past is None else past.position, None, dtype, True, "chunk", self.segment
        )
        learner = _Segments(self, layer, [] if turn.observers else None)
        wide = [token.to(dtype) for token in tokens]
        with full_precision(x):
            o, parts = run_sequence(learner, wide, [0.0] * 4, started.parts, started, turn.sequences.bounds)
        if learner.written is not None:
            self._tell(turn, layer, learner.written)
        first, weights, momentum, held = parts
        turn.memory = TitansState(first, weights, momentum, turn.position + turn.sequences.lengths(x))
        turn.windows["segment"] = held.transpose(1, 2).flatten(-2)
        return o.to(x.dtype)

    def _tell(self, turn: Turn, layer: Titans, written: list[list[Tensor]]) -> None:
        """Tell of all segments as of one call of the memory's op."""
        q, k, v, *gates = (torch.cat(pieces, 2).transpose(1, 2) for pieces in zip(*written, strict=True))
        options = dict(zip(("theta", "eta", "alpha"), gates, strict=True))
        constants = {"mini_batch": self.segment, "normalize_step": layer.normalize_step}
        turn.tell(ops.titans, (q, k, v), {**options, "weights": layer.first(), **constants})


class _Segments:
    """The inner loop of a call, segment by segment."""

    shaped = 0

    def __init__(self, parts: SegmentMemory, layer: Titans, written: list[list[Tensor]] | None) -> None:
        """Keep the modules, and a list for what is written, if somebody wants to know."""
        self.parts, self.layer = parts, layer
        self.mini_batches = (parts.segment,)
        self.written = written
        """Of each piece: what the memory was asked, keys, values and gates, ``[B, H, C, .]``."""

    def begin(self, rows: int) -> tuple[Any, ...]:
        """Begin nowhere: the layer does."""
        raise NotImplementedError

    def step(self, token: Sequence[Tensor], parts: tuple[Any, ...], position: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        """Take no token alone: a segment is one piece or several."""
        raise NotImplementedError

    def block(
        self, tokens: Sequence[Tensor], parts: tuple[Any, ...], real: Tensor | None, place: int
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Attend, write what attention says, and gate it by the memory's answer."""
        q, k, v, asked = tokens  # [B, H, C, K]
        start, weights, velocity, held = parts
        own, place, length = self.parts, place % self.parts.segment, q.shape[2]
        recalled = apply_mlp(start, asked, "gelu").transpose(1, 2).flatten(-2)  # [B, C, H * K]
        remembered = heads(own.recalled(recalled.to(own.recalled.weight.dtype)).to(q.dtype), 2 * own.heads)
        remembered = remembered.transpose(1, 2).chunk(2, 1)
        new = torch.cat((k, v, *remembered), -1)
        before, now, later = held.split((place, length, held.shape[2] - place - length), 2)
        if real is not None:
            new = torch.where(real[..., None] > 0, new, now)
        held = torch.cat((before, new, later), 2)
        k, v, mk, mv = held[:, :, : place + length].chunk(4, -1)
        i, j = (torch.arange(n, device=q.device) for n in (length, place + length))
        sees = (i[:, None] + place >= j).expand(q.shape[0], -1, -1)
        y = attend(q, torch.cat((mk, k), 2), torch.cat((mv, v), 2), sees.repeat(1, 1, 2), own.persistent)
        flat = y.transpose(1, 2).flatten(-2)  # [B, C, H * K]
        written = own.write(flat.to(own.write.weight.dtype)).to(q.dtype)
        asks, keys, values = (heads(w, own.heads) for w in written.chunk(3, -1))
        asks, keys, values, gates = self.layer.written(asks, keys, values, self.layer.gates(flat))
        write = [z.transpose(1, 2) for z in (asks, keys, values, *(g.to(q.dtype) for g in gates.values()))]
        if real is not None:
            write[3:] = write[3] * real, torch.where(real > 0, write[4], 1.0), write[5] * real
        if self.written is not None:
            self.written.append(write)
        o, memory = momentum_block(write, (start, weights, velocity), real, "gelu", False, self.layer.normalize_step)
        return own.norm(y) * torch.sigmoid(o), (*memory, held)

    def turn(self, parts: tuple[Any, ...], index: int) -> tuple[Any, ...]:
        """Begin a segment at the memory as it is, with nothing held."""
        del index
        _, weights, velocity, held = parts
        return weights, weights, velocity, torch.zeros_like(held)
