"""What is done to a state between calls: kept, moved, reordered, selected, cut back, written to a file and read again.

A state is a tensor, or a NamedTuple of tensors, or of tuples of them; axis 0 of each counts rows. Everything here takes
a state and returns a new one of the same structure, and takes None, which stands for the empty memory, wherever that
has a meaning.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import innerloop.rules  # ruff: ignore[unused-import] - rules go by their names here, so the list must have been read
from innerloop import files
from innerloop.network import NetworkRule, find
from innerloop.rule import Rule, State, get
from innerloop.shapes import check_shape

__all__ = ["VERSION", "clone", "crop", "detach", "load", "nbytes", "reorder", "save", "select", "to"]

VERSION = 1
"""Of the files that ``save`` writes; ``load`` reads no other."""
_FORMAT = "innerloop state"


def clone(state: State) -> State:
    """Copy a state; the copy shares no memory and keeps its history.

    Args:
        state: A tensor, a NamedTuple of tensors, or None.

    Returns:
        The same structure.

    Example:
        >>> import torch
        >>> from innerloop import states
        >>> state = torch.zeros(1, 2, 3, 3)
        >>> states.clone(state).add_(1).sum(), state.sum()
        (tensor(18.), tensor(0.))
    """
    return _mapped(state, lambda x: x.clone(memory_format=torch.contiguous_format))


def detach(state: State) -> State:
    """Cut a state off from the gradients of what made it, as between the pieces of truncated backpropagation.

    Args:
        state: A tensor, a NamedTuple of tensors, or None.

    Returns:
        The same structure, sharing memory with what was given.
    """
    return _mapped(state, Tensor.detach)


def to(state: State, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> State:
    """Move a state to another precision or device; what counts tokens keeps its integers.

    Args:
        state: A tensor, a NamedTuple of tensors, or None.
        dtype: Of the float tensors; theirs if None. A call goes on in its own precision whatever this is.
        device: Where to; stays if None.

    Returns:
        The same structure.

    Raises:
        TypeError: If ``dtype`` is not one of floats.

    Example:
        >>> import torch
        >>> from innerloop import ops, states
        >>> q, k, v = torch.randn(3, 1, 4, 2, 3).unbind(0)
        >>> _, state = ops.softmax_attention(q, k, v, output_final_state=True)
        >>> [x.dtype for x in states.to(state, dtype=torch.bfloat16)]
        [torch.bfloat16, torch.bfloat16, torch.int64]
    """
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"dtype must be of floats; got {dtype}")
    return _mapped(state, lambda x: x.to(device=device, dtype=dtype if x.is_floating_point() else None))


def nbytes(state: State) -> int:
    """Return how many bytes a state's tensors take.

    Args:
        state: A tensor, a NamedTuple of tensors, or None.

    Returns:
        The bytes, 0 for None.

    Example:
        >>> import torch
        >>> from innerloop import states
        >>> states.nbytes(torch.zeros(1, 2, 64, 64))
        32768
    """
    return sum(x.numel() * x.element_size() for x in _tensors(state))


def select(state: State, rows: Tensor | Sequence[int]) -> State:
    """Keep some rows of a batch, in the order named; a row may be named several times.

    Args:
        state: A tensor, a NamedTuple of tensors, or None.
        rows: Numbers from 0 to below N, or N truths.

    Returns:
        The same structure with as many rows as were named.

    Raises:
        TypeError: If ``rows`` holds neither whole numbers nor truths.
        ValueError: If a number is out of range, or the truths are not N.

    Example:
        >>> import torch
        >>> from innerloop import states
        >>> states.select(torch.arange(4.0), [3, 0])
        tensor([3., 0.])
    """
    if state is None:
        return None
    index = _checked_rows(_tensors(state)[0], rows, "rows")
    return _mapped(state, lambda x: x.index_select(0, index.to(x.device)))


def reorder(state: State, index: Tensor | Sequence[int]) -> State:
    """Let row n go on from row ``index[n]``, as a beam search does after it has ranked its candidates.

    Args:
        state: A tensor, a NamedTuple of tensors, or None.
        index: N numbers from 0 to below N.

    Returns:
        The same structure and shape.

    Raises:
        TypeError: If ``index`` does not hold whole numbers.
        ValueError: If it does not hold N of them, or one is out of range.

    Example:
        >>> import torch
        >>> from innerloop import states
        >>> states.reorder(torch.arange(3.0), [2, 0, 0])
        tensor([2., 0., 0.])
    """
    if state is None:
        return None
    first = _tensors(state)[0]
    chosen = _checked_rows(first, index, "index")
    if len(chosen) != first.shape[0]:
        raise ValueError(f"index must name one row for each of N={first.shape[0]}; got {len(chosen)}. "
                         "select takes any number.")  # fmt: skip
    return _mapped(state, lambda x: x.index_select(0, chosen.to(x.device)))


def crop(rule: str | Rule | NetworkRule, state: State, length: int | Tensor) -> State:
    """Forget all but the first tokens, where the memory still has them apart: softmax attention alone.

    Args:
        rule: The rule whose state it is, or its name.
        state: Its state.
        length: How many tokens to keep, one number or ``[N]``; no row may have fewer.

    Returns:
        The state as it was after that many tokens.

    Raises:
        TypeError: If ``length`` is no whole number.
        ValueError: If the rule's memory merges its tokens, or a row has fewer than ``length``.

    Example:
        >>> import torch
        >>> from innerloop import ops, states
        >>> q, k, v = torch.randn(3, 1, 9, 2, 3).unbind(0)
        >>> _, state = ops.softmax_attention(q, k, v, output_final_state=True)
        >>> states.crop("softmax_attention", state, 5).keys.shape
        torch.Size([1, 5, 2, 3])
        >>> states.crop("linear_attention", torch.zeros(1, 2, 3, 3), 5)
        Traceback (most recent call last):
            ...
        ValueError: linear_attention cannot forget single tokens; keep a clone to go back to
    """
    rule = known(rule)
    if isinstance(rule, NetworkRule) or not rule.grows:
        raise ValueError(f"{rule.name} cannot forget single tokens; keep a clone to go back to")
    named = _checked(rule, state)
    (counts,) = (name for name, axes in rule.states.items() if not axes)
    kept = torch.as_tensor(length, device=named[counts].device) if isinstance(length, int | Tensor) else None
    if kept is None or kept.is_floating_point() or kept.is_complex() or kept.dtype == torch.bool:
        raise TypeError(f"length must be a whole number, or N of them; got {length!r:.60}")
    held = named[counts]
    if kept.ndim and kept.shape != held.shape:
        raise ValueError(f"length must be one number or have shape [N={held.shape[0]}]; got {list(kept.shape)}")
    kept = kept.expand_as(held).to(held.dtype).clone()
    if kept.numel() and bool((kept < 0).any() | (kept > held).any()):
        raise ValueError(f"length must lie between 0 and what each row holds, {held.tolist()[:8]}; "
                         f"got {kept.tolist()[:8]}")  # fmt: skip
    room = int(kept.max()) if kept.numel() else 0
    named[counts] = kept
    for name, axes in rule.states.items():
        if "S" in axes:
            named[name] = named[name].narrow(1 + axes.index("S"), 0, room).clone()
    return rule.packed_state(list(named.values()))


def save(path: str | os.PathLike[str], rule: str | Rule | NetworkRule, state: State) -> None:
    """Write a state to a safetensors file; whatever interrupts it, the path holds the old file or the new one.

    Args:
        path: The file; an old one is replaced.
        rule: The rule whose state it is, or its name.
        state: Its state, on any device.

    Raises:
        TypeError: If ``state`` has not the rule's structure.
        ValueError: If a shape disagrees, or the rule is unknown.
        FileNotFoundError: If its folder does not exist.
        OSError: If the file cannot be written.

    Example:
        >>> import tempfile, torch
        >>> from innerloop import states
        >>> file = tempfile.mkdtemp() + "/memory.safetensors"
        >>> states.save(file, "delta_rule", torch.ones(1, 2, 3, 4))
        >>> states.load(file, "delta_rule").shape
        torch.Size([1, 2, 3, 4])
    """
    rule = known(rule)
    write(path, named(rule, state), _metadata(rule))


def known(rule: str | Rule | NetworkRule) -> Rule | NetworkRule:
    """Return a rule by its name, or as given; ValueError if there is none."""
    return rule if isinstance(rule, NetworkRule) else find(rule) or get(rule)


def named(rule: Rule | NetworkRule, state: State) -> dict[str, Tensor]:
    """Return the tensors of a state by name; TypeError or ValueError if it is not the rule's."""
    return rule.named(state) if isinstance(rule, NetworkRule) else _checked(rule, state)


def from_named(rule: Rule | NetworkRule, tensors: dict[str, Tensor]) -> State:
    """Return the state whose tensors have these names; TypeError or ValueError if it would not be the rule's."""
    if isinstance(rule, NetworkRule):
        return rule.from_named(tensors)
    return rule.packed_state(list(_checked(rule, rule.packed_state([tensors[x] for x in rule.states])).values()))


def write(path: str | os.PathLike[str], named: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors to a safetensors file; whatever interrupts it, the path holds the old file or the new one."""
    named = {name: clone(x.detach().cpu()) for name, x in named.items()}
    with files.whole(path) as partial:
        try:
            save_file(named, partial, metadata)
        except SafetensorError as error:  # what the system said of a write is in its words
            raise OSError(f"{path} cannot be written: {str(error).partition(chr(10))[0]}") from None
        _settle(partial)


def _settle(path: Path) -> None:
    """Put a file's metadata in order: safetensors writes them in another one in every process."""
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
        assert len(text) <= size, "the same in another order is as long"
        file.seek(8)
        file.write(text.ljust(size))


def read(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read a safetensors file: its metadata and its tensors, on the CPU; ValueError if it is damaged."""
    open(path, "rb").close()  # a missing file is the system's to report, before safetensors words it as damage
    try:
        with safe_open(path, framework="pt") as file:
            # A tensor of the file is a map of it, which a later writer would change or cut off.
            return file.metadata() or {}, {name: file.get_tensor(name).clone() for name in file.keys()}
    except SafetensorError as error:
        what = str(error).partition("\n")[0]
        raise ValueError(f"{path} must be a whole safetensors file; it cannot be read: {what}") from None


def load(path: str | os.PathLike[str], rule: str | Rule | NetworkRule) -> State:
    """Read what ``save`` wrote, to the bit.

    Args:
        path: The file.
        rule: The rule that is to go on from it, or its name.

    Returns:
        The state, on the CPU.

    Raises:
        ValueError: If the file holds something else, another rule's state, one of another version, or is damaged.
        OSError: If there is no such file.
    """
    rule = known(rule)
    metadata, found = read(path)
    check_metadata(path, metadata, _FORMAT, VERSION, by="states.save")
    named = _metadata(rule)
    for key, words in (("rule", "hold a state of"), ("states", "have the structure")):
        if metadata.get(key) != named[key]:
            raise ValueError(f"{path} must {words} {named[key]}; got {metadata.get(key)}")
    wanted = found if isinstance(rule, NetworkRule) else rule.states
    if set(found) != set(wanted):
        raise ValueError(f"{path} must hold {', '.join(wanted)}; got {', '.join(found) or 'nothing'}")
    try:
        return from_named(rule, found)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} does not fit together: {error}") from None


def _metadata(rule: Rule | NetworkRule) -> dict[str, str]:
    states = rule.form if isinstance(rule, NetworkRule) else json.dumps(rule.states)
    return {"format": _FORMAT, "version": str(VERSION), "rule": rule.name, "states": states}


def check_metadata(
    path: str | os.PathLike[str], found: dict[str, str], wanted: str, version: int, *, by: str
) -> None:
    """Raise ValueError unless a safetensors file says that it is of this format and version, which ``by`` writes."""
    if found.get("format") != wanted:
        raise ValueError(f"{path} must be a file that {by} wrote; it is some other safetensors file")
    if found.get("version") != str(version):
        raise ValueError(f"{path} must have version {version}; got {found.get('version')}. "
                         "Load it with the release of innerloop that wrote it.")  # fmt: skip


def _checked(rule: Rule, state: State) -> dict[str, Tensor]:
    """Return the state's tensors by name, once they are seen to be what the rule says."""
    names = list(rule.states)
    given = tuple(state) if rule.state_type is not None and isinstance(state, tuple) else (state,)
    if len(given) != len(names) or not all(isinstance(x, Tensor) for x in given):
        wanted = f"{rule.state_type.__name__}({', '.join(names)})" if rule.state_type else "a tensor"
        raise TypeError(f"the state of {rule.name} must be {wanted}; got {_kind(state)}")
    sizes: dict[str, int] = {}
    for (name, axes), tensor in zip(rule.states.items(), given, strict=True):
        if tensor.is_floating_point() != bool(axes):
            raise TypeError(f"the state's {name} must hold {'floats' if axes else 'integers'}; got {tensor.dtype}")
        check_shape(f"the state's {name}", tensor, ("N", *axes), sizes)
        if tensor.is_meta:
            raise ValueError(f"the state's {name} must hold numbers; it is a meta tensor, a shape alone")
    for (name, axes), tensor in zip(rule.states.items(), given, strict=True):
        if not axes and tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) <= sizes["S"]:
            raise ValueError(f"the state's {name} must lie in [0, S={sizes['S']}]; got {tensor.tolist()[:8]}")
    return dict(zip(names, given, strict=True))


def _checked_rows(first: Tensor, rows: Tensor | Sequence[int], name: str) -> Tensor:
    count = first.shape[0]
    if not isinstance(rows, Tensor | Sequence) or isinstance(rows, str):
        raise TypeError(f"{name} must be a tensor or a list of whole numbers; got {type(rows).__name__}")
    index = torch.as_tensor(rows, device=first.device)
    if index.numel() == 0 and not isinstance(rows, Tensor):
        index = index.long()  # an empty list has no type of its own
    if index.dtype == torch.bool:
        if tuple(index.shape) != (count,):
            raise ValueError(f"{name} must hold N={count} truths; got shape {list(index.shape)}")
        return index.nonzero()[:, 0]
    if index.is_floating_point() or index.is_complex():
        raise TypeError(f"{name} must hold whole numbers or truths; got {str(index.dtype).removeprefix('torch.')}")
    if index.ndim != 1:
        raise ValueError(f"{name} must have one axis; got shape {list(index.shape)}")
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < count:
        raise ValueError(f"{name} must lie between 0 and N-1={count - 1}; got {index.tolist()[:8]}")
    return index.long()


def _kind(state: object) -> str:
    own = ", which has methods of its own: state.save(path), state.select(rows)" if hasattr(state, "windows") else ""
    return type(state).__name__ + own


def _tensors(state: State) -> tuple[Tensor, ...]:
    if state is None or isinstance(state, Tensor):
        return () if state is None else (state,)
    if not isinstance(state, tuple):
        raise TypeError(f"state must be a tensor, a NamedTuple of tensors, or None; got {_kind(state)}")
    if all(isinstance(x, Tensor) for x in state):
        return state
    return tuple(x for part in state for x in _tensors(part))


def _mapped(state: Any, function: Callable[[Tensor], Tensor]) -> Any:  # ruff: ignore[any-type] - a State is any structure
    if state is None or isinstance(state, Tensor):
        return None if state is None else function(state)
    _tensors(state)
    mapped = [function(x) if isinstance(x, Tensor) else _mapped(x, function) for x in state]
    return type(state)(*mapped) if hasattr(state, "_fields") else tuple(mapped)
