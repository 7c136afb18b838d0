"""A memory that is a network over one sequence: surprise, write and forgetting, by asking it after every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from innerloop import ops
from innerloop.algebra import self_modifying
from innerloop.algebra.mlp import apply_mlp
from innerloop.algebra.normed_fit import apply_biased, norm
from innerloop.inspect.reading import effective_rank
from innerloop.inspect.trace import Trace, half_life

Weights = tuple[Tensor, ...]
State = Any
Asked = Callable[[Tensor], Tensor]
"""What a memory answers to ``[M, G, K]``."""


class Memory(Protocol):
    """How to ask the networks of one rule; a state of one row, before the first token the first weights."""

    def asked(self, state: State) -> Asked:
        """Return the network that a state holds."""
        ...

    def written(self, state: State, t: int) -> tuple[Tensor, Tensor]:
        """Return the key and the value ``[G, .]`` that token t writes into a state."""
        ...

    def matrix(self, state: State) -> Tensor | None:
        """Return the memory ``[G, K, V]`` if it is a linear map."""
        ...


class _Titans:
    def __init__(self, tokens: Sequence[Tensor], options: dict[str, Any]) -> None:
        self.k, self.v, self.options = tokens[1][0], tokens[2][0], options

    def _weights(self, state: State) -> Weights:
        return self.options["weights"] if state is None else tuple(w[0] for w in state.weights)

    def asked(self, state: State) -> Asked:
        weights, options = self._weights(state), self.options
        activation, residual = options.get("activation", "gelu"), options.get("residual", False)
        return lambda x: apply_mlp(weights, x.transpose(0, 1), activation, residual).transpose(0, 1)

    def written(self, state: State, t: int) -> tuple[Tensor, Tensor]:
        del state
        return _align(self.k[t], self.v.shape[1]), self.v[t]

    def matrix(self, state: State) -> Tensor | None:
        weights = self._weights(state)
        return weights[0] if len(weights) == 1 else None


class _TTT(_Titans):
    def _weights(self, state: State) -> Weights:
        if state is None:
            return self.options["weights"]
        size = self.options.get("mini_batch", 16)
        place = int(state.position[0]) % size
        if place == 0:  # the mini-batch has been settled
            return tuple(w[0] for w in state.start)
        offset = self.options.get("position_offset")
        factor = max(1 / place + (0.0 if offset is None else float(offset[place - 1])), 0.0)
        return tuple(w[0] - factor * s[0] for w, s in zip(state.start, state.accumulated, strict=True))

    def asked(self, state: State) -> Asked:
        weights, options = self._weights(state), self.options

        def ask(x: Tensor) -> Tensor:
            read = norm(apply_biased(weights, x.transpose(0, 1)), options["norm_weight"], options["norm_bias"])
            return x + read.transpose(0, 1)

        return ask

    def matrix(self, state: State) -> Tensor | None:
        weights = self._weights(state)
        return weights[0] if len(weights) == 2 else None


class _Hope:
    """Keys, values and targets are those that the memories themselves give the token."""

    def __init__(self, tokens: Sequence[Tensor], options: dict[str, Any]) -> None:
        self.x, self.options = tokens[0][0], options
        self.residual = options.get("residual", True)

    def _memories(self, state: State, field: str) -> tuple[Weights, ...]:
        if state is None:
            return tuple(self.options["weights"][:5])
        return tuple(tuple(w[0] for w in memory) for memory in getattr(state, field))

    def asked(self, state: State) -> Asked:
        return self._of(self._memories(state, "weights")[4])

    def _of(self, memory: Weights) -> Asked:
        return lambda x: self_modifying.answer(memory, x.transpose(0, 1), self.residual).transpose(0, 1)

    def written(self, state: State, t: int) -> tuple[Tensor, Tensor]:
        key, value, _, _, memory = (self._of(found) for found in self._memories(state, "snapshots"))
        x = self.x[t][None]
        k, v = self_modifying.unit(key(x)), value(x)
        v = self_modifying.unit(v) if self.options.get("normalize_v", True) else v
        return k[0], memory(v)[0]

    def matrix(self, state: State) -> Tensor | None:
        memory = self._memories(state, "weights")[4]
        return memory[0] if len(memory) == 1 else None


class _CMS:
    """Every level of every head is shown as a head; a level writes at the end of its window."""

    def __init__(self, tokens: Sequence[Tensor], options: dict[str, Any]) -> None:
        self.x, self.options = tokens[0][0], options

    def _levels(self, state: State) -> list[Asked]:
        found = self.options["weights"] if state is None else [[w[0] for w in level] for level in state.weights]
        activation = self.options.get("activation", "gelu_tanh")

        def level(weights: Weights) -> Asked:
            return lambda x: apply_mlp(weights, x.transpose(0, 1), activation, True).transpose(0, 1)

        return [level(tuple(weights)) for weights in found]

    def asked(self, state: State) -> Asked:
        levels = self._levels(state)

        def ask(x: Tensor) -> Tensor:
            pieces = x.chunk(len(levels), 1)
            return torch.cat([level(piece) for level, piece in zip(levels, pieces, strict=True)], 1)

        return ask

    def written(self, state: State, t: int) -> tuple[Tensor, Tensor]:
        h, keys = self.x[t][None], []
        for level in self._levels(state):
            keys.append(h[0])
            h = level(h)
        return torch.cat(keys), self.options["target"][0, t].flatten(0, 1)

    def matrix(self, state: State) -> Tensor | None:
        del state
        return None


KINDS: dict[str, Callable[[Sequence[Tensor], dict[str, Any]], Memory]] = {
    "titans": _Titans, "ttt": _TTT, "hope": _Hope, "cms": _CMS,
}  # fmt: skip
"""Rules that can be looked into."""
GATES = {"titans": ("theta", "eta", "alpha"), "ttt": ("lr",), "hope": (), "cms": ("rate",)}
_BY_TOKEN = {"theta", "eta", "alpha", "lr", "rate", "target"}


@torch.no_grad()
def trace_network(
    rule: str, tokens: Sequence[Tensor], options: dict[str, Any], names: Sequence[str] | None = None
) -> Trace:
    r"""Run a rule whose memory is a network over one sequence, token by token, and ask it after each.

    A network is no linear map of what was written, so reads have no parts, and a rank only a memory of one matrix has.
    The half-life is that of a write's effect on its own key's answer: with :math:`\Delta_i` what the answer to k_i
    moved by at token i, tokens until :math:`\langle m_t(k_i) - m_{i-1}(k_i), \Delta_i \rangle \le |\Delta_i|^2 / 2`.

    Args:
        rule: ``"ttt"``, ``"titans"``, ``"hope"`` or ``"cms"``.
        tokens: Those of its op, in their order, one row each.
        options: The op's by name: gates, first weights and constants.
        names: What to call the tokens; their numbers if None.

    Returns:
        The trace, its ``returns`` None, and its ``rank`` None unless the memory is a matrix. Heads of ``cms`` are its
        levels'.

    Raises:
        ValueError: If there is more than one row, or another number of names.
    """
    if any(x.shape[0] != 1 for x in tokens):
        raise ValueError(f"tokens must have one row; got {tokens[0].shape[0]}. Look at one sequence at a time")
    length = tokens[0].shape[1]
    if names is not None and len(names) != length:
        raise ValueError(f"tokens must name each of the T={length} tokens; got {len(names)}")
    tokens, options = pytree.tree_map(lambda x: x.double() if isinstance(x, Tensor) else x, (list(tokens), options))
    run = _Run(rule, list(tokens), options)
    for t in range(length):
        run.token(t)
    return run.trace(rule, [str(t) for t in range(length)] if names is None else [str(name) for name in names])


class _Run:
    """The loop, and what it has found."""

    def __init__(self, rule: str, tokens: list[Tensor], options: dict[str, Any]) -> None:
        self.op, self.tokens, self.options = getattr(ops, rule), tokens, options
        if options.pop("use_qk_l2norm_in_kernel", False):
            self.tokens[:2] = map(self_modifying.unit, tokens[:2])
        self.memory = KINDS[rule](self.tokens, options)
        self.state: State = None
        self.keys: list[Tensor] = []
        self.before: list[Tensor] = []
        self.moved: list[Tensor] = []
        self.found: dict[str, list[Tensor]] = {"surprise": [], "written": [], "rank": [], "kept": []}

    def token(self, t: int) -> None:
        """Write one token, and ask for all that were written so far."""
        k, v = self.memory.written(self.state, t)
        before = self.memory.asked(self.state)(k[None])[0]
        at = {name: x[:, t : t + 1] if name in _BY_TOKEN else x for name, x in self.options.items()}
        one = [x[:, t : t + 1] for x in self.tokens]
        _, self.state = self.op(*one, **at, initial_state=self.state, output_final_state=True)
        self.keys.append(k)
        self.before.append(before)
        answers = self.memory.asked(self.state)(torch.stack(self.keys))  # [t + 1, G, V]
        moved, error = answers[t] - before, v - before
        self.moved.append(moved)
        size = error.square().sum(-1)
        self.found["surprise"].append(size.sqrt())
        self.found["written"].append((moved * error).sum(-1) / torch.where(size == 0, 1.0, size))
        self.found["kept"].append(self._kept(answers))
        matrix = self.memory.matrix(self.state)
        if matrix is not None:
            self.found["rank"].append(effective_rank(matrix))

    def _kept(self, answers: Tensor) -> Tensor:
        """Return the share of each write's effect that is left, ``[G, T]``; 1 of what never had any."""
        moved = torch.stack(self.moved)
        size = moved.square().sum(-1)
        left = ((answers - torch.stack(self.before)) * moved).sum(-1)
        share = torch.where(size == 0, 1.0, left / torch.where(size == 0, 1.0, size)).T
        return torch.nn.functional.pad(share, (0, self.tokens[0].shape[1] - share.shape[1]))

    def trace(self, rule: str, names: list[str]) -> Trace:
        """Put together what was found."""
        stacked = {name: torch.stack(x) for name, x in self.found.items() if x}
        empty = torch.zeros(0, 1, dtype=torch.float64)
        surprise, written = (stacked.get(name, empty).T for name in ("surprise", "written"))
        kept = stacked["kept"].transpose(0, 1) if names else torch.zeros(1, 0, 0, dtype=torch.float64)
        gates = {name: self.options[name][0].flatten(1).T for name in GATES[rule]}
        return Trace(
            rule, names, surprise=surprise, written=written, half_life=half_life(kept),
            rank=stacked["rank"].T if "rank" in stacked else None, returns=None, gates=gates,
        )  # fmt: skip


def _align(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[0], 0)
