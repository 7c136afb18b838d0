"""What a layer carries from one call to the next."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from innerloop import states
from innerloop.network import NetworkRule
from innerloop.rule import Rule, State

__all__ = ["VERSION", "LayerState"]

VERSION = 1
"""Of the files that ``LayerState.save`` writes; ``load`` reads no other."""
_FORMAT = "innerloop layer state"


@dataclass(eq=False)
class LayerState:
    """The memory of a layer's rule, the inputs that its convolutions still look at, and how far each row has come.

    Methods return a new state and leave this one as it is. It is a pytree.

    Example:
        >>> import torch
        >>> from innerloop import nn
        >>> layer = nn.GatedDeltaNet(16, heads=2)
        >>> _, state = layer(torch.randn(3, 5, 16))
        >>> state.memory.shape, sorted(state.windows), state.position
        (torch.Size([3, 2, 8, 8]), ['key', 'query', 'value'], tensor([5, 5, 5]))
        >>> state.select([2, 0]).position
        tensor([5, 5])
    """

    rule: str
    """The rule whose memory it is."""
    memory: State
    """As ``innerloop.ops`` returns it."""
    windows: dict[str, Tensor]
    """By name, the last inputs of each short convolution or token shift, ``[N, W-1, C]``, zeros before the first."""
    position: Tensor
    """Tokens that each row has seen, int64 ``[N]``."""

    def detach(self) -> LayerState:
        """Cut the state off from the gradients of what made it."""
        return self._mapped(states.detach)

    def clone(self) -> LayerState:
        """Copy every tensor; the copy keeps its history."""
        return self._mapped(states.clone)

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> LayerState:
        """Move to another precision or device; what counts tokens keeps its integers."""
        return self._mapped(lambda x: states.to(x, dtype=dtype, device=device))

    def reorder(self, index: Tensor | Sequence[int]) -> LayerState:
        """Let row n go on from row ``index[n]``, as a beam search does."""
        return self._mapped(lambda x: states.reorder(x, index))

    def select(self, rows: Tensor | Sequence[int]) -> LayerState:
        """Keep some rows, in the order named; a row may be named several times."""
        return self._mapped(lambda x: states.select(x, rows))

    def crop(self, length: int | Tensor) -> LayerState:
        """Forget all but the first tokens, where the memory has them apart: softmax attention alone.

        Args:
            length: How many tokens to keep, one number or ``[N]``; no row may have fewer.

        Returns:
            The state as it was after that many tokens.

        Raises:
            TypeError: If ``length`` is no whole number.
            ValueError: If the memory merges its tokens or has let go of some, as behind a window (keep a clone to go
                back to), or a row has fewer.
        """
        rule = self._known("cannot forget single tokens; keep a clone to go back to")
        if not isinstance(rule, NetworkRule) and rule.grows and bool((self.memory.lengths < self.position).any()):
            raise ValueError(f"this {self.rule} has let go of tokens before its window; keep a clone to go back to")
        memory = states.crop(self.rule, self.memory, length)
        position = torch.as_tensor(length, device=self.position.device).expand_as(self.position)
        return LayerState(self.rule, memory, dict(self.windows), position.to(torch.int64).clone())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.numel() * x.element_size() for x in pytree.tree_leaves(self) if x is not None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file; whatever interrupts it, the path holds the old file or the new one.

        Args:
            path: The file; an old one is replaced.

        Raises:
            ValueError: If the layer is a RecipeLayer, of whose parts only the recipe knows.
            OSError: If the file cannot be written.
        """
        named = self.named()
        names = json.dumps([name for name in named if name != "position"])  # in their order, which a pytree minds
        metadata = {"format": _FORMAT, "version": str(VERSION), "rule": self.rule, "tensors": names}
        states.write(path, named, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LayerState:
        """Read what ``save`` wrote, on the CPU.

        Args:
            path: The file.

        Returns:
            The state; the layer that it is given to sees whether it fits.

        Raises:
            ValueError: If the file holds something else, is of another version or damaged.
            OSError: If there is no such file.
        """
        metadata, named = states.read(path)
        states.check_metadata(path, metadata, _FORMAT, VERSION, by="LayerState.save")
        try:
            return cls.from_named(metadata.get("rule", ""), json.loads(metadata.get("tensors", "[]")), named)
        except ValueError as error:
            raise ValueError(f"{path} does not fit together: {error}") from None

    def named(self) -> dict[str, Tensor]:
        """Return every tensor by a name of its own, as files hold them."""
        rule = self._known("has parts that only its recipe knows and goes into no safetensors file; use torch.save")
        found = {f"memory.{name}": x for name, x in states.named(rule, self.memory).items()}
        return found | {f"windows.{name}": x for name, x in self.windows.items()} | {"position": self.position}

    @classmethod
    def from_named(cls, rule: str, order: Sequence[str], named: dict[str, Tensor]) -> LayerState:
        """Return the state whose ``named`` these tensors are.

        Args:
            rule: The rule.
            order: The names, but for ``position``, in the order in which ``named`` had them.
            named: The tensors.

        Returns:
            The state.

        Raises:
            ValueError: If a tensor is missing or one too many, or they differ in rows.
        """
        found = states.known(rule)
        wanted = {"position", *order}
        if not isinstance(found, NetworkRule):
            wanted |= {f"memory.{name}" for name in found.states}
        if set(named) != wanted:
            raise ValueError(f"it must hold {', '.join(sorted(wanted))}; got {', '.join(sorted(named))}")
        rows = named["position"].shape
        if len(rows) != 1 or any(x.shape[:1] != rows for x in named.values()):
            raise ValueError("its tensors must have as many rows as position")
        own = {x.removeprefix("memory."): named[x] for x in order if x.startswith("memory.")}
        memory = states.from_named(found, own)
        windows = {name.removeprefix("windows."): named[name] for name in order if name.startswith("windows.")}
        return cls(found.name, memory, windows, named["position"])

    def _known(self, otherwise: str) -> Rule | NetworkRule:
        """Return the rule by its name, or say what the state of one without a name does ``otherwise``."""
        try:
            return states.known(self.rule)
        except ValueError:
            raise ValueError(f"the state of a {self.rule} {otherwise}") from None

    def _mapped(self, function: Callable[[Any], Any]) -> LayerState:
        windows = {name: function(window) for name, window in self.windows.items()}
        return LayerState(self.rule, function(self.memory), windows, function(self.position))


def _flatten(state: LayerState) -> tuple[list[Any], str]:
    return [state.memory, state.windows, state.position], state.rule


def _flatten_with_keys(state: LayerState) -> tuple[list[tuple[Any, Any]], str]:
    children, rule = _flatten(state)
    names = [pytree.GetAttrKey(x) for x in ("memory", "windows", "position")]
    return list(zip(names, children, strict=True)), rule


def _unflatten(children: Any, rule: str) -> LayerState:  # ruff: ignore[any-type] - a pytree's children are any structure
    return LayerState(rule, *children)


pytree.register_pytree_node(
    LayerState,
    _flatten,
    _unflatten,
    serialized_type_name="innerloop.nn.LayerState",
    to_dumpable_context=lambda rule: rule,
    from_dumpable_context=lambda rule: rule,
    flatten_with_keys_fn=_flatten_with_keys,
)
