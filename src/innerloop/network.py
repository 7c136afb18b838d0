"""What a rule is whose memory is a network: how it is described, what a call of it learns with, where it is found."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from innerloop.rule import Gate

Parts = tuple[Any, ...]
"""What a state holds before its position: tuples of weights."""


class Learner(Protocol):
    """The inner loop of one call: where it begins, what a token does to it, and what many do at once."""

    shaped: int
    """Which of its tokens has the shape of what is read."""
    mini_batches: tuple[int, ...]
    """Sizes of the mini-batches at whose ends a state turns."""

    def begin(self, rows: int) -> Parts:
        """Return the state before the first token."""
        ...

    def step(self, token: Sequence[Tensor], parts: Parts, position: Tensor) -> tuple[Tensor, Parts]:
        """Write one token ``[B, G, .]`` and read, ``position`` ``[B]`` tokens after the first."""
        ...

    def block(self, tokens: Sequence[Tensor], parts: Parts, real: Tensor | None, place: int) -> tuple[Tensor, Parts]:
        """Do the same for tokens ``[B, G, C, .]`` of one mini-batch at once."""
        ...

    def turn(self, parts: Parts, index: int) -> Parts:
        """Return what the end of a mini-batch of ``mini_batches[index]`` makes of a state."""
        ...


class NetworkRule:
    """A rule whose memory is a network: its first weights come with the call, and its state holds as many tensors.

    A subclass describes; what is computed is a Learner that its public function makes.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    """Where it was published: authors (year), arXiv id."""
    departs: ClassVar[str] = ""
    """Why the update is not one step on one loss a token."""
    axes: ClassVar[dict[str, tuple[str, ...]]] = {
        "q": ("B", "T", "H", "K"),
        "k": ("B", "T", "H", "K"),
        "v": ("B", "T", "G", "V"),
    }
    """Its tokens by name, gates not among them."""
    gates: ClassVar[tuple[Gate, ...]] = ()
    neutral: ClassVar[dict[str, float]] = {}
    """The value at which a token leaves the state alone, where it is not 0."""
    state_type: ClassVar[type]
    """A NamedTuple; each field a tuple of tensors, or of such tuples, the last ``position``, int64 ``[N]``."""

    constants: ClassVar[tuple[()]] = ()
    family: ClassVar[None] = None
    has_chunk: ClassVar[bool] = True
    chunk_size: ClassVar[int] = 128
    """The longest piece of a mini-batch that is taken at once."""

    def named(self, state: Any) -> dict[str, Tensor]:  # ruff: ignore[any-type] - a state is any structure
        """Return the tensors of a state by name, such as ``weights.0``.

        Raises:
            TypeError: If it is not this rule's state.
        """
        if type(state) is not self.state_type:
            raise TypeError(f"the state of {self.name} must be {self.form}; got {type(state).__name__}")
        return dict(zip(_paths(state), pytree.tree_leaves(state), strict=True))

    def from_named(self, named: dict[str, Tensor]) -> Any:  # ruff: ignore[any-type] - a state is any structure
        """Return the state whose tensors have these names.

        Raises:
            ValueError: If names are missing or unknown.
        """
        state = self.state_type(*(_nested(name, named) for name in self.state_type._fields))
        place = state[-1]
        if not isinstance(place, Tensor) or set(_paths(state)) != set(named) or () in state[:-2]:
            raise ValueError(f"the state of {self.name} must hold {self.form}; got {', '.join(sorted(named))}")
        if place.ndim != 1 or place.dtype != torch.int64 or any(x.shape[:1] != place.shape for x in named.values()):
            raise ValueError(f"the state's tensors must have as many rows as its position, int64 [N], has numbers; got "
                             f"{ {name: list(x.shape) for name, x in named.items()} }")  # fmt: skip
        return state

    @property
    def form(self) -> str:
        """The state's type and fields, in words."""
        return f"{self.state_type.__name__}({', '.join(self.state_type._fields)})"


def _paths(tree: Any, before: str = "") -> list[str]:  # ruff: ignore[any-type] - any structure
    """Return the names of a state's tensors: field, then places in its tuples."""
    if isinstance(tree, Tensor):
        return [before]
    names = getattr(tree, "_fields", range(len(tree)))
    return [x for name, part in zip(names, tree, strict=True) for x in _paths(part, f"{before}.{name}".lstrip("."))]


def _nested(name: str, named: dict[str, Tensor]) -> Any:  # ruff: ignore[any-type] - any structure
    if name in named:
        return named[name]
    parts = []
    while any(f"{x}.".startswith(f"{name}.{len(parts)}.") for x in named):
        parts.append(_nested(f"{name}.{len(parts)}", named))
    return tuple(parts)


_NETWORKS: dict[str, NetworkRule] = {}


def register(rule: NetworkRule) -> NetworkRule:
    """Make a rule known by its name."""
    assert rule.departs and rule.state_type._fields[-1] == "position"
    _NETWORKS[rule.name] = rule
    # A saved state loads with torch.load's defaults, which unpickle nothing unknown.
    torch.serialization.add_safe_globals([rule.state_type])
    return rule


def find(rule: object) -> NetworkRule | None:
    """Return the rule of this name if its memory is a network, or the rule itself."""
    return rule if isinstance(rule, NetworkRule) else _NETWORKS.get(rule) if isinstance(rule, str) else None


def named_arguments(rule: NetworkRule, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise ValueError unless ``given`` holds all that a rule's function needs by name, and nothing unknown."""
    known = inspect.signature(function).parameters
    taken = [name for name, x in known.items() if x.kind is x.KEYWORD_ONLY and name not in _OPTIONS]
    for name in given:
        if name not in taken:
            raise ValueError(f"{rule.name} takes {', '.join(taken)}; got an unknown {name!r}")
    for name in taken:
        if known[name].default is inspect.Parameter.empty and given.get(name) is None:
            got = ", ".join(other for other, x in given.items() if x is not None)
            raise ValueError(f"{rule.name} needs {name!r}; got {got or 'none'}")


_OPTIONS = frozenset((
    "scale", "initial_state", "output_final_state", "cu_seqlens", "use_qk_l2norm_in_kernel", "form", "chunk_size",
    "backend",
))  # fmt: skip


def names() -> tuple[str, ...]:
    """Return the names of all rules whose memories are networks."""
    return tuple(_NETWORKS)
