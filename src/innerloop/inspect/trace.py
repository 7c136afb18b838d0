"""One rule over one sequence, token by token: surprise, write, forgetting, rank, and what each read is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from innerloop import ops
from innerloop.checks import check_inputs
from innerloop.inspect.reading import answer, check_readable, effective_rank, matrix
from innerloop.rule import Rule, get, take_gates
from innerloop.shapes import align_heads

_EPSILON = 1e-6
"""Of unit keys, as ``use_qk_l2norm_in_kernel`` has it."""


@dataclass(frozen=True)
class Trace:
    """What a memory did with a sequence, by head and token; numbers are float64."""

    rule: str
    tokens: list[str]
    """What stands at each place."""
    surprise: Tensor
    """How far the memory's answer to a token's key was from its value before the write, ``|v - m(k)|``, ``[G, T]``."""
    written: Tensor
    """The share of that surprise which the write took away, ``[G, T]``: 1 if the key now answers its value, above 1 if
    it overshoots, 0 if nothing was written."""
    half_life: Tensor
    """Tokens until a value has half the weight in its own key's answer that it had when it was written, ``[G, T]``: by
    fading or by what was written since; inf if the sequence ends before."""
    rank: Tensor | None
    """Effective rank of the state after each token, ``[G, T]``; None if the memory is a deep network."""
    returns: Tensor | None
    """How much of each token's value is in each read, ``[G, T, T]`` (read, written): the read is their sum. None if
    the memory is a network, whose reads are no sum."""
    gates: dict[str, Tensor] = field(default_factory=dict)
    """Each gate, ``[G, T]``, the mean over its channels."""

    @property
    def returned(self) -> Tensor | None:
        """Which token has the largest part in each read, ``[G, T]``; -1 where nothing was read."""
        if self.returns is None:
            return None
        most, place = self.returns.abs().max(-1)
        return place.masked_fill(most == 0, -1)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON can hold it; a half-life that the sequence does not reach is None."""
        numbers = {name: getattr(self, name) for name in ("surprise", "written", "rank", "returns")}
        returned = self.returned
        half = [[None if math.isinf(x) else int(x) for x in row] for row in self.half_life.tolist()]
        return {
            "rule": self.rule, "tokens": self.tokens,
            **{name: None if x is None else _rounded(x) for name, x in numbers.items()},
            "half_life": half, "returned": None if returned is None else returned.tolist(),
            "gates": {name: _rounded(x) for name, x in self.gates.items()},
        }  # fmt: skip


@torch.no_grad()
def trace(
    rule: str | Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    tokens: Sequence[str] | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> Trace:
    r"""Run a rule over one sequence and keep what it did.

    Reads are linear in the values for every rule whose memory is a matrix or a list of pairs, so a value that is a unit
    vector of its own tells its part in every read exactly: ``returns`` is that matrix, of which

    .. math:: o_t = \sum_{i \le t} A_{ti} v_i

    Args:
        rule: A name, or a registered rule, of matrix memory or attention.
        q: Queries, ``[1, T, H, K]``.
        k: Keys, ``[1, T, H, K]``; of ``delta_product`` ``[1, T, n, H, K]``.
        v: Values, ``[1, T, G, V]``; of ``delta_product`` ``[1, T, n, G, V]``.
        tokens: What to call the tokens; their numbers if None.
        scale: As of the op.
        use_qk_l2norm_in_kernel: As of the op.
        options: Gates and constants by name, as of the op.

    Returns:
        The trace.

    Raises:
        TypeError: If an input has another type.
        ValueError: If there is more than one row, a shape disagrees, or the memory is none that can be looked into.

    Example:
        >>> import torch
        >>> from innerloop.inspect import trace
        >>> k = torch.eye(3)[[0, 1, 0]][None, :, None]
        >>> v = torch.tensor([[1.0], [2.0], [5.0]])[None, :, None]
        >>> found = trace("delta_rule", k, k, v, beta=torch.ones(1, 3, 1), scale=1.0)
        >>> found.surprise.tolist(), found.returned.tolist()
        ([[1.0, 2.0, 4.0]], [[0, 1, 2]])
        >>> found.half_life.tolist()
        [[2.0, inf, inf]]
    """
    rule = get(rule)
    check_readable(rule)
    names = _names(tokens, q, k, v)
    gates, _ = take_gates(rule, options)
    widened = {name: x.double() if isinstance(x, Tensor) else x for name, x in gates.items()}
    check_inputs(rule, q.double(), k.double(), v.double(), widened, None, None)
    run = _Run(rule, q, k, v, options, scale, use_qk_l2norm_in_kernel)
    for t in range(len(names)):
        run.token(t)
    return run.trace(names)


class _Run:
    """The loop's inputs, widened by a unit value a token, and what it has found."""

    def __init__(
        self, rule: Rule, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], scale: float | None, unit: bool
    ) -> None:
        q, k, v = (x.double() for x in (q, k, v))
        if rule.grouped:
            k, v = (align_heads(x, q.shape[-2]) for x in (k, v))
        self.rule, self.width, self.length = rule, v.shape[-1], v.shape[1]
        self.scale = rule.default_scale(q.shape[-1]) if scale is None else scale
        if unit:
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPSILON) for x in (q, k))
        self.steps = k.shape[2] if k.ndim == 5 else 1
        self.q, self.k = q, k
        self.v = torch.cat((v, self._marks(v)), -1)
        self.options = {name: self._widened(name, x) for name, x in options.items() if x is not None}
        self.state: Any = None
        self.heads = v.shape[-2]
        self.keys = align_heads(k, self.heads).reshape(self.length, self.steps, self.heads, k.shape[-1])
        self.found: dict[str, list[Tensor]] = {"surprise": [], "written": [], "rank": [], "reads": [], "kept": []}

    def _marks(self, v: Tensor) -> Tensor:
        """Return a unit vector a write, in the shape of the values."""
        writes = self.length * self.steps
        marks = torch.eye(writes, dtype=v.dtype).view(1, self.length, self.steps, 1, writes)
        marks = marks.expand(-1, -1, -1, v.shape[-2], -1)
        return marks if v.ndim == 5 else marks[:, :, 0]

    def _widened(self, name: str, x: Any) -> Any:  # ruff: ignore[any-type] - a gate or a constant
        gate = next((gate for gate in self.rule.gates if gate.name == name), None)
        if gate is None or not isinstance(x, Tensor):
            return x
        x = x.double()
        if gate.axes[-1] != "V":
            return x
        # A gate of the values' channels acts on a mark with its mean.
        return torch.cat((x, x.mean(-1, keepdim=True).expand(*x.shape[:-1], self.length * self.steps)), -1)

    def token(self, t: int) -> None:
        """Write and read one token."""
        at = {name: self._at(name, x, t) for name, x in self.options.items()}
        mine = self.keys[t]  # [n, G, K]
        right = self.v[0, t].reshape(self.steps, self.heads, -1)[..., : self.width]
        before = torch.zeros_like(right) if self.state is None else self._answer(mine, at)[..., : self.width]
        # Every value of the sequence is 0 but for this token's, so an empty memory needs no state of its own.
        read, self.state = ops.step(
            self.rule, self.q[:, t], self.k[:, t], self.v[:, t], state=self.state, scale=self.scale, **at
        )
        after = self._answer(mine, at)[..., : self.width]
        error = right - before
        size = error.square().sum((0, 2))  # [G]
        moved = ((after - before) * error).sum((0, 2))
        self.found["surprise"].append((size / self.steps).sqrt())
        self.found["written"].append(moved / torch.where(size == 0, 1.0, size))
        self.found["rank"].append(effective_rank(matrix(self.rule, self.state, self.width)))
        self.found["reads"].append(self._parts(read[0]))
        self.found["kept"].append(self._kept(t, at))

    def _answer(self, x: Tensor, at: dict[str, Any]) -> Tensor:
        return answer(self.rule, self.state, x, at, self.scale)

    def _at(self, name: str, x: Any, t: int) -> Any:  # ruff: ignore[any-type] - a gate or a constant
        gate = next((gate for gate in self.rule.gates if gate.name == name), None)
        return x[:, t] if gate is not None and gate.axes[:2] == ("B", "T") else x

    def _parts(self, read: Tensor) -> Tensor:
        """Return the parts ``[G, T]`` of all tokens in reads ``[..., V + n T]``; several writes as one length."""
        marks = read[..., self.width :].unflatten(-1, (self.length, self.steps))
        return marks[..., 0] if self.steps == 1 else marks.norm(dim=-1)

    def _kept(self, t: int, at: dict[str, Any]) -> Tensor:
        """Return each written value's part in its own key's answer, ``[G, T]``, 0 for those to come."""
        keys = self.keys[: t + 1].flatten(0, 1)  # [(t + 1) n, G, K]
        marks = self._answer(keys, at)[..., self.width :]
        own = marks.diagonal(dim1=0, dim2=2).unflatten(-1, (t + 1, self.steps)).mean(-1)  # [G, t + 1]
        return torch.nn.functional.pad(own, (0, self.length - t - 1))

    def trace(self, names: list[str]) -> Trace:
        """Put together what was found."""
        empty = torch.zeros(0, self.heads, dtype=torch.float64)
        stacked = {n: torch.stack(x) if x else empty for n, x in self.found.items()}
        per_token = {n: stacked[n].T for n in ("surprise", "written", "rank")}
        square = (self.length, self.heads, self.length)
        parts, kept = (stacked[n].reshape(square).transpose(0, 1) for n in ("reads", "kept"))
        gates = {
            gate.name: self._shown(gate.name)
            for gate in self.rule.gates
            if gate.name in self.options and gate.axes[:2] == ("B", "T")
        }
        return Trace(self.rule.name, names, **per_token, half_life=half_life(kept), returns=parts, gates=gates)

    def _shown(self, name: str) -> Tensor:
        x = self.options[name][0]
        gate = next(gate for gate in self.rule.gates if gate.name == name)
        axes = gate.axes[1:]
        if axes[-1] == "V":
            x = x[..., : self.width]
        if axes[-1] in ("K", "V"):
            x = x.mean(-1)
        if "n" in axes:
            x = x.mean(1)
        if "H" in axes:
            x = align_heads(x[..., None], self.heads)[..., 0]
        return x.reshape(self.length, self.heads).T


def half_life(kept: Tensor) -> Tensor:
    """Return after how many tokens each part is half of what it was, ``[G, T]``, from parts ``[G, T, T]`` (at, of)."""
    length = kept.shape[-1]
    start = kept.diagonal(dim1=1, dim2=2)  # [G, T]
    if not length:
        return start
    at, of = torch.arange(length)[:, None], torch.arange(length)
    gone = (kept.abs() <= start.abs()[:, None] / 2) & (at > of)
    first = torch.where(gone.any(1), gone.int().argmax(1), length) - of
    return torch.where(gone.any(1), first.double(), math.inf)


def _names(tokens: Sequence[str] | None, q: Tensor, k: Tensor, v: Tensor) -> list[str]:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(x).__name__}")
        if x.ndim < 4 or x.shape[0] != 1:
            raise ValueError(f"{name} must be one row, [1, T, ...]; got {list(x.shape)}. Look at one at a time")
    length = q.shape[1]
    if tokens is None:
        return [str(t) for t in range(length)]
    if len(tokens) != length:
        raise ValueError(f"tokens must name each of the T={length} tokens; got {len(tokens)}")
    return [str(token) for token in tokens]


def _rounded(x: Tensor) -> Any:  # ruff: ignore[any-type] - nested lists
    return torch.round(x, decimals=6).tolist()
