"""Families whose memory is matrices: from an operator's inputs to a core's call and back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from innerloop.kernels.native.family import Native, Values
from innerloop.kernels.native.library import (
    ELEMENTS,
    HEADER_SIZE,
    TENSOR,
    TENSOR_SIZE,
    Core,
    Plan,
    Recent,
    addresses,
    as_read,
    contiguous,
    empty,
    outline,
    strided,
    structure,
    threads_for,
)
from innerloop.kernels.native.spare import Spare
from innerloop.shapes import compute_dtype

_CHUNK = 32
"""Tokens a chunk, unless fewer were asked for: what fits beside the memory in a core's cache."""
_LONG = 2048
"""Tokens beyond which a call with gradients takes chunks twice as large: half as many memories to keep."""
_LARGE = 128 * 128
"""Numbers of a memory from which turning and carrying it costs more than the products of larger chunks."""

_BESIDE = 128 * 256
"""Numbers of memories that lie side by side in a core's cache, with room for a chunk's own."""


class Fields:
    """What a core's call says, and where.

    In order: the header; whole numbers; the scale; inputs; states; the trail; the output and the final states; of
    gradients the output's, the final states', the inputs', the states', and their types.

    Args:
        whole: How many whole numbers.
        inputs: How many inputs: q, k, v and every gate that the core knows.
        states: How many matrices a memory has.
        types: How many types of gradients.
    """

    def __init__(self, whole: int, inputs: int, *, states: int = 1, types: int = 1) -> None:
        """Count where everything stands."""
        self.inputs, self.states, self.types = inputs, states, types
        self.layout = f"{whole}q d {inputs * TENSOR} {2 * states + 2}q {TENSOR} {2 * states + inputs + types}q"
        self.bounds = HEADER_SIZE - 1
        self.first = HEADER_SIZE + whole + 1
        self.state = self.first + inputs * TENSOR_SIZE
        self.trail = self.state + states
        self.out = self.trail + 1
        self.slope = self.out + 1 + states
        self.end = self.slope + TENSOR_SIZE
        self.grads = self.end + states

    def held_at(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Return where the addresses of inputs in these slots, of the states and of the bounds stand."""
        states = range(self.state, self.state + self.states)
        return (*[self.first + TENSOR_SIZE * slot for slot in slots], *states, self.bounds)

    def values_at(self) -> tuple[int, ...]:
        """Return where the addresses of the trail, of the output and of the final states stand."""
        return tuple(range(self.trail, self.slope))

    def slopes_at(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Return the same of the trail, of the gradients that come in and of those that go out."""
        states = range(self.grads + self.inputs, self.grads + self.inputs + self.states)
        return (self.trail, self.slope, *range(self.end, self.grads),
                *[self.grads + slot for slot in slots], *states)  # fmt: skip

    def filled(
        self, whole: Sequence[int], scale: float, inputs: dict[int, Tensor], slope: Tensor | None, types: Sequence[int]
    ) -> tuple[float, ...]:
        """Return the fields after the header; addresses other than the inputs' are zero."""
        tensors = [field for slot in range(self.inputs) for field in strided(inputs.get(slot))]
        between, behind = self.slope - self.state, 2 * self.states + self.inputs
        return (*whole, scale, *tensors, *(0,) * between, *strided(slope), *(0,) * behind, *types)


_TRAILS = Spare()


class _Slopes(NamedTuple):
    """A call for gradients, prepared: outlines of those that are wanted."""

    run: Plan
    found: tuple[Tensor | None, ...]


class Matrices(Native):
    """A family through a core whose memory is matrices.

    Args:
        gates: Which gates it takes, in the operator's order.
        slots: Where each stands among the core's inputs, counted from q.
    """

    core: ClassVar[Core]
    fields: ClassVar[Fields]
    long: ClassVar[int] = _LONG
    """Tokens beyond which chunks are twice as large where a memory is large, in calls with gradients."""
    together: ClassVar[int] = 1
    """Heads that a job takes at most, side by side: what lies together in memory is read together."""

    def __init__(self, gates: tuple[str, ...], slots: Sequence[int]) -> None:
        """Say which family it is."""
        super().__init__(gates)
        self._slots = (0, 1, 2, *slots)
        self._slopes = Recent[_Slopes]()

    @abstractmethod
    def whole(self, held: Sequence[Any], size: int, together: int, unit: bool) -> tuple[int, ...]:
        """Return the whole numbers of a call in chunks of so many tokens, jobs of so many heads."""

    @abstractmethod
    def gate_gradients(self, held: Sequence[Any]) -> list[tuple[Sequence[int], torch.dtype]]:
        """Return shapes and types of what the core gives for the gates."""

    def types(self, wide: torch.dtype, held: Sequence[Any]) -> tuple[int, ...]:
        """Return the types of gradients, where those of q and k have ``wide``."""
        del held
        return (ELEMENTS[wide],)

    def as_read(self, inputs: Sequence[Any], bounds: Tensor | None) -> list[Any]:
        """Return an operator's inputs and the bounds of packed sequences as kernels read them."""
        return as_read(inputs, bounds, self.fields.states)

    def prepare(self, held: Sequence[Any], options: Sequence[Any], leave: bool) -> Values:
        """Return a call for a sequence."""
        _, length, heads, width = held[2].shape
        fields = self._fields(held, options, leave, None)
        # Of one chunk there is nothing that would not be had as soon.
        long = leave and length > self._chunk(held, options, leave)
        trail = outline((self.core.trail_size(*fields),), torch.uint8) if long else None
        run = self.core.plan(0, (*self.fields.held_at(self._slots), *self.fields.values_at()), *fields)
        state = outline((_rows(held), heads, held[0].shape[3], width), compute_dtype(held[2].dtype))
        return Values(run, outline(held[2].shape, held[2].dtype), (state,) * self.fields.states, trail, leave)

    def run(self, call: Values, held: Sequence[Any]) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Return ``o`` and the memory after the last token, and the trail of memories where the call leaves one."""
        # Nobody writes what lies outside of packed sequences.
        out = empty(call.out) if held[-1] is None else call.out.new_zeros(call.out.shape)
        trail = None if call.trail is None else _TRAILS.take(call.trail)
        results = (out, *[empty(x) for x in call.states])
        call.run(*addresses((*held, trail, *results)))
        return results, trail

    def prepare_token(
        self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Any], states: Sequence[Any], scale: float, unit: bool
    ) -> Values:
        """Return a call for one token."""
        tokens = [q, k, v, *[gates.get(name) for name in self.gates]]
        held = [*[x if x is None else x.unsqueeze(1) for x in tokens], *states, None]
        call = self.prepare(held, (None, scale, unit, 1), False)
        wide = call.states[0].dtype
        direct = not any(x is not None and x.is_neg() for x in tokens) and all(
            x is None or (x.dtype == wide and x.is_contiguous() and not x.is_neg()) for x in states
        )
        # Of one token a whole tensor, which torch copies in three quarters of the time that an outline takes.
        return call._replace(out=torch.empty(v.shape, dtype=v.dtype), direct=direct)

    def token(
        self, call: Values, inputs: Sequence[Any], states: Sequence[Any], overwrite: bool
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return what one token ``[B, G, .]`` reads, and the memory after it."""
        if not call.direct:
            inputs = [x if x is None or not x.is_neg() else x.resolve_neg() for x in inputs]
            if not overwrite:
                states = [x if x is None else contiguous(x, call.states[0].dtype) for x in states]
        out = torch.empty_like(call.out)
        if states[0] is None or not overwrite:
            after = [empty(x) for x in call.states]
        else:
            after = states
        call.run(*addresses((*inputs, *states, None, None, out, *after)))
        if after is states:  # a graph that kept the state for its backward must see that it has changed
            torch._C._increment_version(states)
        return out, after

    def written(
        self, held: Sequence[Tensor | None], states: Sequence[Tensor], out: Tensor, scale: float, unit: bool
    ) -> list[float]:
        """Return all fields of a call for one token ``[B, 1, ...]``, which overwrites the states."""
        fields = list(self._fields([*held, *states, None], (None, scale, unit, 1), False, None))
        before, after = self.fields.state, self.fields.out + 1
        for i, state in enumerate(states):
            fields[before + i] = fields[after + i] = state.data_ptr()
        fields[self.fields.out] = out.data_ptr()
        return fields

    def backward(
        self,
        inputs: Sequence[Any],
        options: Sequence[Any],
        grads: Sequence[Tensor | None],
        needs: Sequence[bool],
        left: Tensor | None = None,
    ) -> list[Tensor]:
        """Return the gradients of those inputs that need one; without a trail its memories are computed again."""
        v = inputs[2]
        held = self.as_read(inputs, options[0])
        slope = v.new_zeros(()).expand(v.shape) if grads[0] is None else grads[0].resolve_neg()
        ends = [None if x is None else contiguous(x, compute_dtype(v.dtype)) for x in grads[1:]]
        key = [options[1:4], tuple(needs), slope.stride(), *structure(held)]
        call = self._slopes.get(key) or self._slopes.put(key, self._prepare_slopes(held, options, slope, needs))
        found: list[Tensor | None] = [None if x is None else empty(x) for x in call.found]
        if held[-1] is not None:
            for x in found[: -self.fields.states]:
                if x is not None:
                    x.zero_()
        call.run(*addresses((*held, left, slope, *ends, *found)))
        return [_fitted(x, given) for x, given in zip(found, inputs, strict=True) if x is not None]

    def _prepare_slopes(
        self, held: Sequence[Any], options: Sequence[Any], slope: Tensor, needs: Sequence[bool]
    ) -> _Slopes:
        q, k, v = held[:3]
        dtype = compute_dtype(v.dtype)
        # What heads of values give to a head of keys that they share is summed behind the call, unrounded.
        wide = dtype if v.shape[2] > k.shape[2] else v.dtype
        keys, state = ((*v.shape[:3], q.shape[3]), wide), ((_rows(held), v.shape[2], q.shape[3], v.shape[3]), dtype)
        shapes = (keys, keys, (v.shape, v.dtype), *self.gate_gradients(held), *(state,) * self.fields.states)
        found = [outline(*shape) if need else None for shape, need in zip(shapes, needs, strict=True)]
        places = (*self.fields.held_at(self._slots), *self.fields.slopes_at(self._slots))
        run = self.core.plan(1, places, *self._fields(held, options, True, slope, self.types(wide, held)))
        return _Slopes(run, tuple(found))

    def _fields(
        self,
        held: Sequence[Any],
        options: Sequence[Any],
        gradients: bool,
        slope: Tensor | None,
        types: Sequence[int] | None = None,
    ) -> tuple[float, ...]:
        _, scale, unit = options[:3]
        rows, (_, length, heads, width), key_width = _rows(held), held[2].shape, held[1].shape[3]
        work = rows * length * heads * width * key_width
        # A step is all reading and writing, which two threads do sooner.
        threads = threads_for(4 * work if length == 1 else work)
        beside = min(self.together, _BESIDE // max(1, width * key_width), rows * heads // (2 * threads))
        together = max(1, beside) if length > 1 else 1
        header = (rows * -(-heads // together), threads, rows, length, 0)
        whole = self.whole(held, self._chunk(held, options, gradients), together, unit)
        inputs = {slot: x for slot, x in zip(self._slots, held, strict=False) if x is not None}
        return (*header, *self.fields.filled(whole, scale, inputs, slope, types or (0,) * self.fields.types))

    def chunk_size(self, asked: int, length: int, key_width: int, width: int, records: bool) -> int:
        """Return how many tokens a chunk takes, at most those asked for."""
        long = self.long if key_width * width >= _LARGE else _LONG
        return min(asked, 2 * _CHUNK if records and length > long else _CHUNK)

    def _chunk(self, held: Sequence[Any], options: Sequence[Any], gradients: bool) -> int:
        _, length, _, width = held[2].shape
        return self.chunk_size(options[3], length, held[1].shape[3], width, gradients)


def _rows(held: Sequence[Any]) -> int:
    bounds = held[-1]
    return held[2].shape[0] if bounds is None else bounds.shape[0] - 1


def _fitted(grad: Tensor, given: Tensor) -> Tensor:
    """Return a gradient with the heads and in the precision of what was given."""
    if grad.shape != given.shape:
        grad = grad.unflatten(2, (given.shape[2], -1)).sum(3)
    return grad if grad.dtype == given.dtype else grad.to(given.dtype)
