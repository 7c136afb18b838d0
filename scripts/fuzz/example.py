"""One call in words that can be typed, how it is drawn, and the tensors it stands for."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import get_args

import torch
from hypothesis import strategies as st
from torch import Tensor

from innerloop.checks import Form
from innerloop.rule import Gate, Rule, get
from innerloop.testing import TOLERANCES, Call, draw_call

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCES["values"]}
LAYOUTS = ("plain", "transposed", "strided", "expanded")
KEYS = ("unit", "zero", "repeated")
EDGES = ("none", "some", "everywhere")
SCALES = (None, 0.7, -1.3, 0.0)


@dataclass(frozen=True)
class Example:
    """One call, in words that can be typed."""

    rule: str
    form: str = "auto"
    """A form, or ``step`` for a loop over ``ops.step``."""
    chunk_size: int | None = None
    B: int = 1
    T: int = 1
    H: int = 1
    groups: int = 1
    """Value heads a key head."""
    K: int = 1
    V: int = 1
    lengths: tuple[int, ...] = ()
    """Of packed sequences, instead of B and T; empty for none."""
    junk: tuple[int, int] = (0, 0)
    """NaN tokens before and behind the packed sequences."""
    cut: int | None = None
    """Where the call is cut in two, the state handed on."""
    dtype: str = "float64"
    wide_gates: bool = False
    """Gates in float32 whatever the dtype."""
    layout: str = "plain"
    edges: str = "none"
    keys: str = "unit"
    omit: bool = False
    """Leave optional gates out."""
    state: bool = False
    final: bool = True
    l2norm: bool = False
    scale: float | None = None
    tracked: int = 0
    """Bits of the tensors whose gradients are wanted, in the call's order."""
    seed: int = 0

    def command(self) -> str:
        """Return what to type to run it again; what has its default is left out."""
        given = {x.name: getattr(self, x.name) for x in fields(self) if getattr(self, x.name) != x.default}
        return f"python -m scripts.fuzz --example '{json.dumps(given)}'"


def read(text: str) -> Example:
    """Return the example that ``command`` printed."""
    return Example(**{name: tuple(x) if isinstance(x, list) else x for name, x in json.loads(text).items()})


def examples(names: Sequence[str]) -> st.SearchStrategy[Example]:
    """Draw any example of these rules."""
    some, flag = st.integers(1, 3), st.booleans()
    packed = st.lists(st.integers(0, 9), min_size=1, max_size=5).map(tuple)
    return st.builds(
        Example,
        rule=st.sampled_from(list(names)),
        form=st.sampled_from((*get_args(Form), "step", "chunk")),
        chunk_size=st.sampled_from((None, 1, 2, 3, 4, 8, 16, 5, 7)),
        B=some,
        T=st.integers(0, 24) | st.sampled_from((0, 1, 15, 16, 17, 33)),
        H=some,
        groups=some,
        K=st.integers(1, 9),
        V=st.integers(1, 9),
        lengths=st.just(()) | packed,
        junk=st.tuples(st.integers(0, 2), st.integers(0, 2)),
        cut=st.none() | st.integers(0, 24),
        dtype=st.sampled_from(list(DTYPES)),
        wide_gates=flag,
        layout=st.sampled_from(LAYOUTS),
        edges=st.sampled_from(EDGES),
        keys=st.sampled_from(KEYS),
        omit=flag,
        state=flag,
        final=flag,
        l2norm=flag,
        scale=st.sampled_from(SCALES),
        tracked=st.just(0) | st.integers(0, 1023) | st.just(1023),
        seed=st.integers(0, 2**16),
    )


def bounds(example: Example) -> list[int] | None:
    """Return where the packed sequences begin and end; None if there are none."""
    if not example.lengths:
        return None
    return list(accumulate(example.lengths, initial=example.junk[0]))


def build(example: Example) -> Call:
    """Draw the call's tensors, put its edges in, and lay them out in memory as it says."""
    rule, packing = get(example.rule), bounds(example)
    length = example.T if packing is None else packing[-1] + example.junk[1]
    rows = example.B if packing is None else 1
    sizes = {"H": example.H, "G": example.H * example.groups, "K": example.K, "V": example.V, "seed": example.seed}
    call = draw_call(rule, B=rows, T=length, edges=example.edges == "some", **sizes)
    if example.state:
        call.state = draw_call(rule, B=rows if packing is None else len(example.lengths), T=3, **sizes).run()[1]
    call.gates = {x.name: call.gates[x.name] for x in rule.gates if not (example.omit and x.optional)}
    generator = random.Random(example.seed)
    if example.edges == "everywhere":
        for gate in rule.gates:
            if gate.name in call.gates:
                call.gates[gate.name].fill_(generator.choice(edge_values(gate)))
    if length and example.keys != "unit":
        call.k[:] = 0 if example.keys == "zero" else call.k[:, :1].clone()
    dtype, axes = DTYPES[example.dtype], axes_of(rule)
    narrow = call.to(dtype)
    if example.wide_gates:
        narrow.gates = {name: x.float() for name, x in call.gates.items()}
    if packing is not None:
        narrow = narrow.map(lambda name, x: surrounded(x, packing) if "T" in axes.get(name, ()) else x)
    return narrow.map(lambda name, x: laid_out(x, example.layout, axes.get(name, ()), generator))


def edge_values(gate: Gate) -> tuple[float, ...]:
    """Return the extremes of a gate, and what lies between."""
    low, high = gate.drawn or (gate.low, gate.high)
    if low == -torch.inf:
        return (high, -80.0, -5000.0, -torch.inf)
    middle = low + 1 if high == torch.inf else (low + high) / 2
    return (low, middle, high)


def axes_of(rule: Rule) -> dict[str, tuple[str, ...]]:
    """Return the axes of a call's tokens by name; states are not among them."""
    return {**rule.axes, **{gate.name: gate.axes for gate in rule.gates}}


def surrounded(x: Tensor, packing: Sequence[int]) -> Tensor:
    """Return a copy with NaN outside of all packed sequences."""
    x = x.clone()
    x[:, : packing[0]] = x[:, packing[-1] :] = torch.nan
    return x


def laid_out(x: Tensor, layout: str, axes: Sequence[str], generator: random.Random) -> Tensor:
    """Return the same numbers as another view of memory; an expanded one repeats its first head instead."""
    if layout == "transposed" and x.ndim > 1:
        first, second = generator.sample(range(x.ndim), 2)
        return x.transpose(first, second).contiguous().transpose(first, second)
    if layout == "strided" and x.ndim:
        around = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan, dtype=x.dtype)
        around[..., 1::2] = x
        return around[..., 1::2]
    if layout == "expanded":
        heads = [i for i, axis in enumerate(axes) if axis in ("H", "G", "Q")]
        return x.narrow(heads[0], 0, 1).expand_as(x) if heads else x
    return x
