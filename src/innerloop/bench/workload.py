"""What is timed: a rule, a shape, a precision, and which way it is run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from innerloop.testing import Call, draw_call

Way = Literal["forward", "both", "decode"]
WAYS: tuple[str, ...] = get_args(Way)
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CHUNK = 32
"""Tokens a chunk for which the arithmetic is counted, whatever a kernel takes: more work is no higher share."""
_MATRICES = {
    **dict.fromkeys(("linear_attention", "retention", "mamba2", "gla"), 0),
    **dict.fromkeys(("delta_rule", "gated_delta_rule", "longhorn", "delta_product", "kda", "gdn2", "rwkv7"), 1),
    "momentum_delta_rule": 2,
}
"""How many matrices a rule carries that it also corrects."""
_PERIOD = 256
"""Tokens after which drawn inputs repeat: the arithmetic does not depend on them, and drawing takes long."""


@dataclass(frozen=True)
class Workload:
    """One thing to time; plain values, so that it can be told to another process."""

    rule: str
    way: Way
    B: int = 1
    T: int = 2048
    H: int = 16
    K: int = 128
    G: int = 0
    """Value heads; H if 0."""
    V: int = 0
    """Value width; K if 0."""
    dtype: str = "float32"

    @property
    def heads(self) -> int:
        """Value heads."""
        return self.G or self.H

    @property
    def width(self) -> int:
        """Value width."""
        return self.V or self.K

    def __str__(self) -> str:
        """Return its name in a table, such as ``forward B1 T2048 H16 K128``."""
        sizes = [f"B{self.B}", f"T{self.T}", f"H{self.H}", f"K{self.K}"]
        if self.way == "decode":
            del sizes[1]
        sizes += [f"G{self.G}"] * (self.heads != self.H) + [f"V{self.V}"] * (self.width != self.K)
        words = {"forward": "forward", "both": "forward+backward", "decode": "decode"}[self.way]
        return " ".join((words, *sizes, *([] if self.dtype == "float32" else [self.dtype])))

    def at(self, **changes: Any) -> Workload:
        """Return the same with other sizes."""
        return replace(self, **changes)

    def draw(self) -> Call:
        """Draw its inputs: unit keys, gates within their ranges, from a seed of their own."""
        length = 1 if self.way == "decode" else self.T
        call = draw_call(
            self.rule, T=min(length, _PERIOD), B=self.B, H=self.H, G=self.heads, K=self.K, V=self.width,
            dtype=torch.float32,
        )  # fmt: skip
        axes = {**call.rule.axes, **{gate.name: gate.axes for gate in call.rule.gates}}

        def repeated(name: str, x: Tensor) -> Tensor:
            place = axes[name].index("T") if "T" in axes[name] else None
            if place is not None and length > x.shape[place]:
                counts = [-(-length // x.shape[place]) if i == place else 1 for i in range(x.ndim)]
                x = x.repeat(counts).narrow(place, 0, length).contiguous()
            return x.to(DTYPES[self.dtype])

        return call.map(repeated)

    def flops(self) -> float:
        """Return how many multiplications and additions the chunk form needs at least, 0 if nobody has counted.

        Per token and head, in chunks of 32, triangles exploited: forward 6KV + (2C + 16) 2K, backward 12KV + 10KC, for
        rules that correct a memory; a rule with a momentum carries a second matrix, and one that only adds needs
        neither the errors nor the solve. Where V is not K, a triangle costs their mean.
        """
        if self.rule not in _MATRICES or self.way == "decode":
            return 0.0
        count, product, side = _MATRICES[self.rule], self.K * self.width, (self.K + self.width) / 2
        if count:
            forward = 6 * count * product + (2 * _CHUNK + 16) * 2 * side
            backward = 12 * count * product + 10 * side * _CHUNK
        else:
            forward, backward = 4 * product + 2 * _CHUNK * side, 8 * product + 5 * _CHUNK * side
        steps = 2 if self.rule == "delta_product" else 1  # as draw_call draws
        return math.prod((self.B, self.T, self.heads, steps)) * (forward + backward * (self.way == "both"))

    def state_bytes(self) -> int:
        """Return the bytes of the state of a rule with one matrix."""
        return self.B * self.heads * self.K * self.width * 4
