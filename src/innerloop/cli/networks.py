"""Rules whose memory is a network, for commands that show rules: calls of them that fill no tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from innerloop.dispatch import Plan
    from innerloop.network import NetworkRule

MEMORIES = {
    "ttt": "a linear map",
    "titans": "a network of widths K, 4K, V",
    "hope": "five linear maps",
    "cms": "three networks of widths K, 4K, K",
}
"""Whose sizes are shown: the memory that the layer of ``innerloop.nn`` has if nothing is said."""
_LEVELS = 3


def empty_call(rule: NetworkRule, sizes: dict[str, int], dtype: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:  # ruff: ignore[any-type] - torch is not loaded yet
    """Return the tokens of a call and what else it needs, of the right shapes and without memory."""
    import torch

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    axes = {**rule.axes, **{gate.name: gate.axes for gate in rule.gates}}
    sizes = {**sizes, "D": sizes["K"], "n": _LEVELS}
    tokens = {name: new(*(sizes[x] for x in letters)) for name, letters in axes.items()}
    return tokens, _SHARED[rule.name](new, sizes)


def plan(rule: NetworkRule, sizes: dict[str, int], dtype: Any, **options: Any) -> Plan:  # ruff: ignore[any-type] - torch is not loaded yet
    """Say which path such a call takes."""
    from innerloop import ops

    tokens, shared = empty_call(rule, sizes, dtype)
    return ops.explain(getattr(ops, rule.name), **tokens, **shared, **options)


def state_bytes(rule: NetworkRule, sizes: dict[str, int]) -> int:
    """Return the bytes of the state of float32 or half inputs, after however many tokens."""
    import torch
    from torch.utils import _pytree as pytree

    weights = empty_call(rule, {**sizes, "V": sizes["K"]}, torch.float32)[1]["weights"]
    # HOPE's biases belong to no memory.
    memories = weights[:5] if rule.name == "hope" else weights
    copies = len(set(rule.state_type._fields) - {"position", "pending"})  # pyright: ignore[reportAttributeAccessIssue]
    return sizes["B"] * (4 * copies * sum(x.numel() for x in pytree.tree_leaves(memories)) + 8)


def _ttt(new: Any, s: dict[str, int]) -> dict[str, Any]:  # ruff: ignore[any-type] - torch is not loaded yet
    G, K = s["G"], s["K"]
    return {"weights": (new(G, K, K), new(G, K)), "norm_weight": new(G, K), "norm_bias": new(G, K)}


def _titans(new: Any, s: dict[str, int]) -> dict[str, Any]:  # ruff: ignore[any-type] - torch is not loaded yet
    G, K, V = s["G"], s["K"], s["V"]
    return {"weights": (new(G, K, 4 * K), new(G, 4 * K, V))}


def _hope(new: Any, s: dict[str, int]) -> dict[str, Any]:  # ruff: ignore[any-type] - torch is not loaded yet
    from innerloop import ops

    H, K = s["H"], s["K"]
    maps = [(new(H, K, width),) for width in (K, K, 1, 1, K)]
    return {"weights": ops.HopeWeights(*maps, rate_bias=new(H), keep_bias=new(H))}


def _cms(new: Any, s: dict[str, int]) -> dict[str, Any]:  # ruff: ignore[any-type] - torch is not loaded yet
    H, K = s["H"], s["K"]
    pair = new(H, K, 4 * K), new(H, 4 * K, K)
    return {"weights": (pair,) * _LEVELS, "periods": (16, 64, 256)}


_SHARED = {"ttt": _ttt, "titans": _titans, "hope": _hope, "cms": _cms}
