"""A short recall with overwrites for a bare rule: orthonormal keys, unit values, gates as they are told."""

from __future__ import annotations

import math
from typing import Any

import torch

from innerloop.data.tasks import OverwriteRecall
from innerloop.rule import Gate, Rule

KEYS, VALUES, WRITES, WIDTH = 4, 6, 2, 8
_USUAL = {"g": -0.05, "theta": 1.0, "eta": 0.0, "alpha": 0.0, "lamb": 0.1}
"""What gates are if nobody says; any other is 1."""


def recall(rule: Rule, gates: dict[str, float], seed: int = 0, most: int = 10**9) -> dict[str, Any]:
    """Return the inputs of :func:`innerloop.inspect.trace` for a recall: every key bound twice, then asked for.

    A question writes nothing where the rule has a strength that can be 0, and otherwise a zero value.

    Args:
        rule: Of matrix memory or attention.
        gates: By name, the value at every token that writes.
        seed: Of the draws.
        most: Tokens to keep.

    Returns:
        ``q``, ``k``, ``v``, gates, ``scale`` and the tokens' names, by the names of trace's arguments.

    Raises:
        ValueError: If a gate is unknown.
    """
    known = [gate.name for gate in rule.gates]
    for name in gates:
        if name not in known:
            raise ValueError(f"{rule.name} takes {', '.join(known) or 'no gates'}; got an unknown {name!r}")
    generator = torch.Generator().manual_seed(seed)
    task = OverwriteRecall(keys=KEYS, values=VALUES, writes=WRITES)
    inputs, _ = task.draw(1, generator)
    keys, contents = inputs[0, :most].unbind(-1)
    asks = contents == VALUES
    frame = torch.linalg.qr(torch.randn(WIDTH, KEYS, generator=generator, dtype=torch.float64))[0].T
    book = torch.randn(VALUES + 1, WIDTH, generator=generator, dtype=torch.float64)
    book = book / book.norm(dim=-1, keepdim=True)
    book[VALUES] = 0
    k, v = frame[keys][None, :, None], book[contents][None, :, None]
    many = "n" in rule.axes["k"]
    named = [f"k{key}?" if ask else f"k{key}=v{value}" for key, value, ask in
             zip(keys.tolist(), contents.tolist(), asks.tolist(), strict=True)]  # fmt: skip
    values = {gate.name: _gate(gate, gates.get(gate.name, _USUAL.get(gate.name, 1.0)), asks) for gate in rule.gates}
    scale = math.sqrt(WIDTH) if rule.grows else 1.0
    pairs = {"k": k[:, :, None], "v": v[:, :, None]} if many else {"k": k, "v": v}
    return {"q": k, **pairs, "scale": scale, "tokens": named, **values}


def _gate(gate: Gate, value: float, asks: torch.Tensor) -> torch.Tensor:
    sizes = {"B": 1, "T": len(asks), "n": 1, "H": 1, "G": 1, "K": WIDTH, "V": WIDTH}
    x = torch.full([sizes[axis] for axis in gate.axes], value, dtype=torch.float64)
    if gate.name in ("beta", "theta", "a", "b", "w"):
        x = x.masked_fill(asks.view(1, -1, *[1] * (x.ndim - 2)), 0.0)
    return x
