"""Draw a call of any rule: what is passed, how it is called, and the edges that hurt."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from innerloop import ops
from innerloop.rule import Gate, Rule, State, get


@dataclass
class Call:
    """The tensors of one call, which remember how to be called."""

    rule: Rule
    q: Tensor
    k: Tensor
    v: Tensor
    gates: dict[str, Tensor]
    state: State = None
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, **options: Any) -> tuple[Tensor, State]:
        """Run ``ops.run`` on them, with the final state."""
        given = {"initial_state": self.state, "output_final_state": True, **self.options, **options, **self.gates}
        return ops.run(self.rule, self.q, self.k, self.v, **given)

    def tensors(self) -> dict[str, Tensor]:
        """Return all float tensors by name."""
        found = {"q": self.q, "k": self.k, "v": self.v, **self.gates}
        found |= dict(zip(self.rule.states, self.rule.state_tensors(self.state), strict=True))
        return {name: x for name, x in found.items() if x is not None and x.is_floating_point()}

    def map(self, function: Callable[[str, Tensor], Tensor]) -> Call:
        """Return the call with every tensor replaced; integer states stay."""
        state = self.state
        if state is not None:
            parts = zip(self.rule.states, self.rule.state_tensors(state), strict=True)
            state = self.rule.packed_state([function(n, x) if x.is_floating_point() else x for n, x in parts])
        gates = {name: function(name, x) for name, x in self.gates.items()}
        q, k, v = (function(name, x) for name, x in (("q", self.q), ("k", self.k), ("v", self.v)))
        return Call(self.rule, q, k, v, gates, state, self.options)

    def to(self, dtype: torch.dtype) -> Call:
        """Return the call in another precision."""
        return self.map(lambda _, x: x.detach().to(dtype))

    def tracked(self) -> Call:
        """Return the call with every tensor a leaf that wants its gradient."""
        return self.map(lambda _, x: x.detach().clone().requires_grad_())

    def tokens(self, start: int, stop: int) -> Call:
        """Return the tokens from ``start`` to ``stop`` alone, with no state."""
        timed = {gate.name for gate in self.rule.gates if "T" in gate.axes}
        gates = {name: x[:, start:stop] if name in timed else x for name, x in self.gates.items()}
        q, k, v = (x[:, start:stop] for x in (self.q, self.k, self.v))
        return Call(self.rule, q, k, v, gates, None, self.options)


def draw_call(
    rule: str | Rule,
    *,
    T: int = 37,
    B: int = 2,
    H: int = 2,
    G: int = 4,
    K: int = 5,
    V: int = 3,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    edges: bool = False,
    state: bool = False,
) -> Call:
    """Draw a call of a rule: unit keys, gates within their ranges.

    Args:
        rule: The rule or its name.
        T: Tokens.
        B: Rows.
        H: Key heads.
        G: Value heads (query heads for grouped attention).
        K: Key width.
        V: Value width.
        dtype: Of every tensor.
        seed: Of the generator.
        edges: Put every gate's extremes (decays of 0, -80, -5000 and -inf among them), repeated and zero keys in.
        state: Start from the state that another drawn sequence left.

    Returns:
        The call.

    Raises:
        ValueError: If the rule is unknown.

    Example:
        >>> from innerloop.testing import draw_call
        >>> o, state = draw_call("delta_rule", T=9).run()
        >>> o.shape
        torch.Size([2, 9, 4, 3])
    """
    rule = get(rule)
    generator = torch.Generator().manual_seed(seed)
    sizes = {"B": B, "T": T, "H": H, "G": G, "K": K, "V": V, "Q": G, "n": 2}

    def normal(axes: Iterable[str]) -> Tensor:
        return torch.randn([sizes[axis] for axis in axes], generator=generator, dtype=torch.float64)

    q, k, v = (normal(rule.axes[name]) for name in "qkv")
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    if rule.nonnegative:
        q, k = q.abs(), k.abs()
    gates = {gate.name: _draw_gate(gate, normal(gate.axes)) for gate in rule.gates}
    if edges and T:
        _put_keys(k, normal(("B",)))
        for gate in rule.gates:
            if _is_key(gate):
                _put_keys(gates[gate.name], normal(("B",)))
            else:
                gates[gate.name] = _put_edges(gate, gates[gate.name], generator)
    options = {x.name: x.drawn_by_width * K for x in rule.constants if x.drawn_by_width}
    call = Call(rule, q, k, v, gates, options=options)
    if state:
        before = draw_call(rule, T=7, B=B, H=H, G=G, K=K, V=V, seed=seed + 1)
        call.state = before.run(form="recurrent")[1]
    return call.to(dtype)


def _draw_gate(gate: Gate, normal: Tensor) -> Tensor:
    if _is_key(gate):
        return torch.nn.functional.normalize(normal, dim=-1)
    unit = torch.special.ndtr(normal)  # uniform in (0, 1)
    first, last = gate.drawn or (gate.low, gate.high)
    if first == -torch.inf:
        return last - unit
    if last == torch.inf:
        return first + 2 * unit / (1 - unit)
    return first + (last - first) * (0.05 + 0.9 * unit)


def _is_key(gate: Gate) -> bool:
    return gate.axes[-2:] == ("H", "K")


def _put_edges(gate: Gate, values: Tensor, generator: torch.Generator) -> Tensor:
    first, last = gate.drawn or (gate.low, gate.high)
    low = (-80.0, -5000.0, -torch.inf) if first == -torch.inf else (first,)
    middle = () if first == -torch.inf or last == torch.inf else ((first + last) / 2,)
    flat = values.clone().flatten()
    for edge in (*low, *middle, last):
        places = torch.randint(len(flat), (1 + len(flat) // 24,), generator=generator)
        flat[places] = edge
    return flat.view_as(values)


def _put_keys(k: Tensor, normal: Tensor) -> None:
    """Repeat one key at every third token, and leave some empty."""
    k[:, 1::3] = k[:, :1]
    k[normal > 0, 2::7] = 0
    k[:, 4::11] = 0
