"""What a language model carries from one call to the next: the states of its layers."""

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
from innerloop.nn import LayerState

VERSION = 1
"""Of the files that ``State.save`` writes; ``load`` reads no other."""
_FORMAT = "innerloop model state"


@dataclass(eq=False)
class State:
    """The states of all layers, which have seen the same tokens.

    Methods return a new state and leave this one as it is. It is a pytree.

    Example:
        >>> import torch
        >>> from innerloop.lm import Config, LanguageModel
        >>> model = LanguageModel(Config(vocab_size=17, width=16, heads=2, pattern="2*kda"))
        >>> _, state = model(torch.tensor([[1, 2, 3], [4, 5, 6]]))
        >>> len(state.layers), state.position, state.select([1]).position
        (2, tensor([3, 3]), tensor([3]))
    """

    layers: tuple[LayerState, ...]
    """From the first to the last."""

    @property
    def position(self) -> Tensor:
        """Tokens that each row has seen, int64 ``[N]``."""
        return self.layers[0].position

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(layer.nbytes for layer in self.layers)

    def detach(self) -> State:
        """Cut the state off from the gradients of what made it, as between pieces of truncated backpropagation."""
        return self._mapped(LayerState.detach)

    def clone(self) -> State:
        """Copy every tensor; the copy keeps its history."""
        return self._mapped(LayerState.clone)

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> State:
        """Move to another precision or device; what counts tokens keeps its integers."""
        return self._mapped(lambda layer: layer.to(dtype=dtype, device=device))

    def reorder(self, index: Tensor | Sequence[int]) -> State:
        """Let row n go on from row ``index[n]``, as a beam search does."""
        return self._mapped(lambda layer: layer.reorder(index))

    def select(self, rows: Tensor | Sequence[int]) -> State:
        """Keep some rows, in the order named; a row may be named several times."""
        return self._mapped(lambda layer: layer.select(rows))

    def crop(self, length: int | Tensor) -> State:
        """Forget all but the first tokens, where all layers have them apart: a model of full attention alone.

        Args:
            length: How many tokens to keep, one number or ``[N]``; no row may have fewer.

        Returns:
            The state as it was after that many tokens.

        Raises:
            TypeError: If ``length`` is no whole number.
            ValueError: If a layer merges its tokens (keep a clone to go back to), or a row has fewer.
        """
        return self._mapped(lambda layer: layer.crop(length))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file; whatever interrupts it, the path holds the old file or the new one.

        Args:
            path: The file; an old one is replaced.

        Raises:
            OSError: If the file cannot be written.
        """
        parts = [layer.named() for layer in self.layers]
        kinds = [
            {"rule": layer.rule, "tensors": [name for name in part if name != "position"]}
            for layer, part in zip(self.layers, parts, strict=True)
        ]
        metadata = {"format": _FORMAT, "version": str(VERSION), "layers": json.dumps(kinds)}
        states.write(path, {f"{i}.{name}": x for i, part in enumerate(parts) for name, x in part.items()}, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> State:
        """Read what ``save`` wrote, on the CPU.

        Args:
            path: The file.

        Returns:
            The state; the model that it is given to sees whether it fits.

        Raises:
            ValueError: If the file holds something else, is of another version or damaged.
            OSError: If there is no such file.
        """
        metadata, named = states.read(path)
        states.check_metadata(path, metadata, _FORMAT, VERSION, by="State.save")
        try:
            layers = [
                LayerState.from_named(kind["rule"], kind["tensors"], _under(named, f"{i}."))
                for i, kind in enumerate(json.loads(metadata["layers"]))
            ]
            if not layers or len({tuple(layer.position.shape) for layer in layers}) > 1:
                raise ValueError("its layers must have as many rows each")
            if len(named) != sum(len(layer.named()) for layer in layers):
                raise ValueError("it holds tensors of no layer")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} does not fit together: {error}") from None
        return cls(tuple(layers))

    def _mapped(self, function: Callable[[LayerState], LayerState]) -> State:
        return State(tuple(function(layer) for layer in self.layers))


def _under(named: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in named.items() if name.startswith(prefix)}


def _flatten(state: State) -> tuple[list[Any], None]:
    return list(state.layers), None


def _flatten_with_keys(state: State) -> tuple[list[tuple[Any, Any]], None]:
    return [(pytree.SequenceKey(i), layer) for i, layer in enumerate(state.layers)], None


def _unflatten(children: Any, context: None) -> State:  # ruff: ignore[any-type] - a pytree's children are any structure
    del context
    return State(tuple(children))


pytree.register_pytree_node(
    State,
    _flatten,
    _unflatten,
    serialized_type_name="innerloop.lm.State",
    to_dumpable_context=lambda context: context,
    from_dumpable_context=lambda context: context,
    flatten_with_keys_fn=_flatten_with_keys,
)
