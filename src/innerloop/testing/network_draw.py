"""Draw a call of a rule whose memory is a network: its tokens, its first weights, and its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from innerloop import ops
from innerloop.network import NetworkRule, find


@dataclass
class NetworkCall:
    """The tensors and settings of one call, which remember how to be called."""

    rule: NetworkRule
    tokens: dict[str, Tensor]
    """By the name of the argument; the first one or two are positional."""
    shared: dict[str, Any]
    """Weights, and what else all rows share: tensors, or tuples of them."""
    settings: dict[str, Any] = field(default_factory=dict)
    state: Any = None

    def run(self, **options: Any) -> tuple[Tensor, Any]:
        """Run the rule's public function, with the final state."""
        given = {"initial_state": self.state, "output_final_state": True, **self.settings, **options}
        tokens = dict(self.tokens)
        first = [tokens.pop(name) for name in self.rule.axes if name != "target"]
        return getattr(ops, self.rule.name)(*first, **tokens, **self.shared, **given)

    def tensors(self) -> dict[str, Tensor]:
        """Return all float tensors by name."""
        tree = {"tokens": self.tokens, "shared": self.shared, "state": self.state}
        return {pytree.keystr(path): x for path, x in pytree.tree_flatten_with_path(tree)[0] if _is_float(x)}

    def map(self, function: Callable[[str, Tensor], Tensor]) -> NetworkCall:
        """Return the call with every float tensor replaced."""
        tree = {"tokens": self.tokens, "shared": self.shared, "state": self.state}
        mapped = pytree.tree_map_with_path(
            lambda path, x: function(pytree.keystr(path), x) if _is_float(x) else x, tree
        )
        return replace(self, **mapped)

    def to(self, dtype: torch.dtype) -> NetworkCall:
        """Return the call in another precision."""
        return self.map(lambda _, x: x.detach().to(dtype))

    def tracked(self) -> NetworkCall:
        """Return the call with every float tensor a leaf that wants its gradient."""
        return self.map(lambda _, x: x.detach().clone().requires_grad_())

    def between(self, start: int, stop: int) -> NetworkCall:
        """Return the tokens from ``start`` to ``stop`` alone, with no state."""
        return replace(self, tokens={name: x[:, start:stop] for name, x in self.tokens.items()}, state=None)

    def rows(self, start: int, stop: int) -> NetworkCall:
        """Return some rows of tokens and state."""
        state = None if self.state is None else pytree.tree_map(lambda x: x[start:stop], self.state)
        return replace(self, tokens={name: x[start:stop] for name, x in self.tokens.items()}, state=state)


def _is_float(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "ttt": {"linear": {"hidden": 0, "mini_batch": 4}, "mlp": {"hidden": 7, "mini_batch": 16}},
    "titans": {
        "linear": {"depth": 1, "mini_batch": 4},
        "mlp": {"depth": 2, "mini_batch": 16},
        "deep": {"depth": 4, "mini_batch": 4, "activation": "silu", "residual": True, "normalize_step": True},
        "normalized": {"depth": 2, "mini_batch": 5, "activation": "gelu_tanh", "normalize_step": True},
    },
    "hope": {
        "linear": {"hidden": 0, "mini_batch": (4, 4)},
        "mlp": {"hidden": 6, "mini_batch": (5, 8)},
        "literal": {
            "hidden": 6, "mini_batch": (4, 6), "read": "before", "normalize_step": False, "normalize_v": False,
            "rate_max": 0.1,
        },
        "everywhere": {"hidden": 6, "mini_batch": (16, 4), "dgd": "all", "residual": False},
    },
    "cms": {
        "three": {"periods": (1, 4, 16), "activation": "gelu"},
        "odd": {"periods": (3, 5), "activation": "silu"},
        "damped": {"periods": (5, 2), "normalize_step": True},
    },
}
"""By rule and name, settings that take other paths."""


def draw_network_call(
    rule: str | NetworkRule,
    variant: str | None = None,
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
) -> NetworkCall:
    """Draw a call of a rule whose memory is a network: unit keys, rates at which it learns and stays finite.

    Args:
        rule: The rule or its name.
        variant: A key of ``VARIANTS[rule]``; the first if None.
        T: Tokens.
        B: Rows.
        H: Key heads.
        G: Value heads.
        K: Key width.
        V: Value width, where it may differ.
        dtype: Of every tensor.
        seed: Of the generator.
        edges: Put every gate's extremes, repeated and zero keys in.
        state: Start from the state that another drawn sequence left, each row at a place of its own.

    Returns:
        The call.

    Raises:
        ValueError: If the rule or the variant is unknown.

    Example:
        >>> from innerloop.testing import draw_network_call
        >>> o, state = draw_network_call("titans", T=9).run()
        >>> o.shape
        torch.Size([2, 9, 4, 3])
    """
    found = find(rule)
    if found is None:
        raise ValueError(f"rule must be one of {', '.join(VARIANTS)}; got {rule!r}")
    known = VARIANTS[found.name]
    if variant is not None and variant not in known:
        raise ValueError(f"variant must be one of {', '.join(known)}; got {variant!r}")
    settings = dict(next(iter(known.values())) if variant is None else known[variant])
    pen = Pen({"B": B, "T": T, "H": H, "G": G, "K": K, "V": V}, torch.Generator().manual_seed(seed))
    call = _DRAWS[found.name](found, pen, settings)
    if edges and T:
        _put_edges(call, pen)
    if state:
        call.state = _drawn_state(call, found, variant, pen.sizes, seed)
    return call.to(dtype)


def _drawn_state(call: NetworkCall, rule: NetworkRule, variant: str | None, sizes: dict[str, int], seed: int) -> Any:  # ruff: ignore[any-type] - any structure
    """Return what sequences of different lengths left: rows that stand at different places."""
    finals = []
    B, H, G, K, V = (sizes[axis] for axis in "BHGKV")
    for row in range(B):
        before = draw_network_call(rule, variant, T=7 + 2 * row, B=B, H=H, G=G, K=K, V=V, seed=seed + 1)
        before.shared = call.shared
        finals.append(before.rows(row, row + 1).run(form="recurrent")[1])
    return pytree.tree_map(lambda *rows: torch.cat(rows), *finals)


class Pen:
    """Draws from one generator, by names of axes."""

    def __init__(self, sizes: dict[str, int], generator: torch.Generator) -> None:
        """Keep both."""
        self.sizes, self.generator = sizes, generator

    def normal(self, *axes: str | int) -> Tensor:
        """Draw standard normal numbers."""
        shape = [axis if isinstance(axis, int) else self.sizes[axis] for axis in axes]
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *axes: str | int) -> Tensor:
        """Draw numbers uniform in (0, 1)."""
        return torch.special.ndtr(self.normal(*axes))

    def unit(self, *axes: str | int) -> Tensor:
        """Draw unit vectors."""
        return torch.nn.functional.normalize(self.normal(*axes), dim=-1)

    def matrix(self, *axes: str | int) -> Tensor:
        """Draw matrices that keep sizes on average."""
        drawn = self.normal(*axes)
        return drawn / drawn.shape[-2] ** 0.5


def _draw_pairs(pen: Pen, width: str) -> dict[str, Tensor]:
    return {"q": pen.unit("B", "T", "H", "K"), "k": pen.unit("B", "T", "H", "K"), "v": pen.normal("B", "T", "G", width)}


def _draw_ttt(rule: NetworkRule, pen: Pen, settings: dict[str, Any]) -> NetworkCall:
    hidden = settings.pop("hidden")
    tokens = _draw_pairs(pen, "K") | {"lr": pen.uniform("B", "T", "G")}
    if hidden:
        first = pen.matrix("G", "K", hidden), pen.normal("G", hidden)
        weights = (*first, pen.matrix("G", hidden, "K"), pen.normal("G", "K"))
    else:
        weights = pen.matrix("G", "K", "K"), pen.normal("G", "K")
    shared = {
        "weights": weights,
        "norm_weight": 1 + 0.3 * pen.normal("G", "K"),
        "norm_bias": pen.normal("G", "K"),
        "position_offset": 0.2 * pen.normal(settings["mini_batch"]),
    }
    return NetworkCall(rule, tokens, shared, settings)


def _draw_titans(rule: NetworkRule, pen: Pen, settings: dict[str, Any]) -> NetworkCall:
    depth, width = settings.pop("depth"), "K" if settings.get("residual") else "V"
    tokens = _draw_pairs(pen, width)
    tokens |= {"theta": 0.2 * pen.uniform("B", "T", "G"), "eta": 0.8 * pen.uniform("B", "T", "G")}
    tokens["alpha"] = 0.3 * pen.uniform("B", "T", "G")
    widths: list[str | int] = ["K", *range(6, 5 + depth), width]
    weights = tuple(pen.matrix("G", a, b) for a, b in pairwise(widths))
    return NetworkCall(rule, tokens, {"weights": weights}, settings)


def _draw_hope(rule: NetworkRule, pen: Pen, settings: dict[str, Any]) -> NetworkCall:
    hidden = settings.pop("hidden")
    widths: list[str | int] = ["K", "K", 1, 1, "K"]
    maps = [
        (pen.matrix("H", "K", hidden), pen.matrix("H", hidden, width)) if hidden else (pen.matrix("H", "K", width),)
        for width in widths
    ]
    weights = ops.HopeWeights(*maps, rate_bias=pen.normal("H"), keep_bias=2 + pen.normal("H"))
    tokens = {"x": pen.normal("B", "T", "H", "K"), "q": pen.unit("B", "T", "H", "K")}
    return NetworkCall(rule, tokens, {"weights": weights}, settings)


def _draw_cms(rule: NetworkRule, pen: Pen, settings: dict[str, Any]) -> NetworkCall:
    pen.sizes |= {"n": len(settings["periods"]), "D": pen.sizes["K"]}
    tokens = {"x": pen.unit("B", "T", "H", "D"), "target": pen.unit("B", "T", "n", "H", "D")}
    tokens["rate"] = 0.03 * pen.uniform("B", "T", "n", "H")
    weights = tuple((pen.matrix("H", "D", 6 + i), pen.matrix("H", 6 + i, "D")) for i in range(pen.sizes["n"]))
    return NetworkCall(rule, tokens, {"weights": weights}, settings)


_DRAWS: dict[str, Callable[[NetworkRule, Pen, dict[str, Any]], NetworkCall]] = {
    "ttt": _draw_ttt,
    "titans": _draw_titans,
    "hope": _draw_hope,
    "cms": _draw_cms,
}


def _put_edges(call: NetworkCall, pen: Pen) -> None:
    """Repeat a key at every third token, leave some empty; set gates to 0, and to 1 where nothing grows by it."""
    first = call.tokens.get("k", call.tokens.get("x"))
    assert first is not None
    first[:, 1::3] = first[:, :1]
    first[:, 4::11] = 0
    for gate in call.rule.gates:
        flat = call.tokens[gate.name].flatten()
        for edge in (0.0, *((1.0,) if gate.name in ("eta", "alpha") else ())):
            flat[torch.randint(len(flat), (1 + len(flat) // 16,), generator=pen.generator)] = edge
        call.tokens[gate.name] = flat.view_as(call.tokens[gate.name])
