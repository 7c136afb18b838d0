"""What a memory answers to a query, apart from any write; by the tensors that a rule keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from innerloop.rule import Rule, State

KINDS = (("S",), ("S", "z"), ("S", "U"), ("H_kk", "H_kv"), ("keys", "values", "lengths"))
"""States that can be read."""


def check_readable(rule: Rule) -> None:
    """Check that a rule keeps what :func:`answer` reads; ValueError if not."""
    if tuple(rule.states) not in KINDS:
        wanted = "; ".join(", ".join(kind) for kind in KINDS)
        raise ValueError(f"the rule must keep one of ({wanted}) to be looked into; {rule.name} keeps "
                         f"{', '.join(rule.states)}")  # fmt: skip


def answer(rule: Rule, state: State, x: Tensor, options: dict[str, Any], scale: float) -> Tensor:
    """Return m(x) of a state of one row.

    Args:
        rule: Whose state it is.
        state: As ``ops.step`` returns it, with one row; None answers 0.
        x: Queries with value heads, ``[M, G, K]``.
        options: The token's gates and the rule's constants by name.
        scale: Of attention's scores; every other memory is read as it is.

    Returns:
        ``[M, G, V]``.
    """
    kind = tuple(rule.states)
    if kind == ("keys", "values", "lengths"):
        size = int(state.lengths[0])
        first = max(0, size - int(options["window"])) if options.get("window") else 0
        keys, values = state.keys[0, first:size], state.values[0, first:size]
        return torch.einsum("mgs,sgv->mgv", torch.einsum("mgk,sgk->mgs", scale * x, keys).softmax(-1), values)
    if kind == ("H_kk", "H_kv"):
        ridge = options["lamb"] if "lamb" in options else torch.full_like(x[0], options.get("ridge", 1.0))
        moment = (state.H_kk[0] + state.H_kk[0].mT) / 2 + torch.diag_embed(ridge.to(x.dtype))
        solved = torch.linalg.solve(moment, x.permute(1, 2, 0))  # [G, K, M]
        return torch.einsum("gkm,gkv->mgv", solved, state.H_kv[0])
    memory = state[0] if kind == ("S",) else state.S[0]
    read = torch.einsum("mgk,gkv->mgv", x, memory)
    if kind == ("S", "z"):
        weight = torch.einsum("mgk,gk->mg", x, state.z[0])[..., None]
        return torch.where(weight == 0, 0.0, read / torch.where(weight == 0, 1.0, weight))
    return read


def matrix(rule: Rule, state: State, width: int) -> Tensor:
    """Return what of a state of one row holds the values, as matrices ``[G, R, V]`` of the first ``width`` columns."""
    kind = tuple(rule.states)
    if kind == ("keys", "values", "lengths"):
        size = int(state.lengths[0])
        return torch.cat((state.keys[0, :size], state.values[0, :size, :, :width]), -1).transpose(0, 1)
    memory = state if kind == ("S",) else state.H_kv if kind == ("H_kk", "H_kv") else state.S
    return memory[0, ..., :width]


def effective_rank(matrices: Tensor) -> Tensor:
    """Return the exponential of the entropy of the singular values, 0 for no memory: Roy and Vetterli (2007)."""
    values = torch.linalg.svdvals(matrices)
    total = values.sum(-1, keepdim=True)
    share = values / torch.where(total == 0, 1.0, total)
    entropy = -torch.special.xlogy(share, share).sum(-1)
    return torch.where(total[..., 0] == 0, 0.0, entropy.exp())
