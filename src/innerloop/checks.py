"""What a call may say: types, shapes, values. Inputs are checked here and nowhere below."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import chain, combinations, pairwise
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import _C, Tensor

from innerloop.kernels.native import missing
from innerloop.rule import Gate, Gates, Rule, State
from innerloop.shapes import check_shape, check_tensor, compute_dtype

if TYPE_CHECKING:
    from innerloop.network import NetworkRule

Form = Literal["auto", "recurrent", "chunk"]
Backend = Literal["torch", "cpu"]
FORMS: tuple[str, ...] = get_args(Form)
BACKENDS: tuple[str, ...] = get_args(Backend)


class NotFiniteError(ValueError, FloatingPointError):
    """A gate holds NaN: a wrong input of a caller, and of a model that makes its gates a sign that it diverged."""


def no_number(name: str) -> NotFiniteError:
    """Return what to raise of a gate that holds NaN."""
    return NotFiniteError(f"{name} must not hold NaN; it does. Look at what makes the gate.")


def choose_form(rule: Rule | NetworkRule, length: int, form: Form) -> str:
    """Return the form that a call of this length takes."""
    if form == "auto":
        return "recurrent" if length == 1 or not rule.has_chunk else "chunk"
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(map(repr, FORMS))}; got {form!r}")
    if form == "chunk" and not rule.has_chunk:
        raise ValueError(
            f"form must be 'recurrent' or 'auto' for {rule.name}, which defines no chunk form; got 'chunk'"
        )
    return form


def serves(rule: Rule, q: Tensor, form: str, backend: str | None) -> bool:
    """Return whether a native kernel takes the call; raise RuntimeError if it was asked for and cannot."""
    if backend == "torch":
        return False
    family = rule.family
    if family is not None and form != "recurrent" and q.is_cpu and family.native is not None and family.native.present:
        return True
    if backend is not None:
        _refuse(refusal(rule, q, form))
    return False


def refusal(rule: Rule | NetworkRule, q: Tensor | None = None, form: str = "auto") -> str:
    """Return why no native kernel takes a call of the rule, or an empty string."""
    if rule.family is None or rule.family.native is None:
        return f"{rule.name} has no native kernel"
    if not rule.family.native.present:
        return missing()
    if form == "recurrent":
        return "form='recurrent' is the definition, which runs in torch"
    return "" if q is None or q.is_cpu else f"native kernels take tensors on the CPU, and q is on {q.device}"


def _refuse(reason: str) -> None:
    if reason:
        raise RuntimeError(f"backend='cpu' cannot serve: {reason}. Leave backend unset to use the best one present.")


def check_options(
    rule: Rule | NetworkRule,
    constants: tuple[float, ...],
    scale: float | None = None,
    chunk_size: int | None = None,
    backend: str | None = None,
    l2norm: bool = False,
) -> int:
    """Check what is no tensor, and return the chunk size."""
    if l2norm is not False and l2norm is not True:
        raise TypeError(f"use_qk_l2norm_in_kernel must be True or False; got {l2norm!r}")
    if scale is not None:
        _check_number("scale", scale, -math.inf)
    if constants:
        for constant, value in zip(rule.constants, constants, strict=False):
            _check_number(constant.name, value, constant.above)
            if constant.whole and value != int(value):
                raise ValueError(f"{constant.name} must be a whole number; got {value}")
    if backend is not None:
        if backend not in BACKENDS:
            raise ValueError(f"backend must be None or one of {', '.join(map(repr, BACKENDS))}; got {backend!r}")
        if backend != "torch":
            _refuse(refusal(rule))
    if chunk_size is None:
        return rule.chunk_size
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, Integral | torch.SymInt):
        raise TypeError(f"chunk_size must be an int or None; got {type(chunk_size).__name__}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1; got {chunk_size}")
    return int(chunk_size)


def _check_number(name: str, value: float, above: float) -> None:
    if type(value) is not float and (
        isinstance(value, bool) or not isinstance(value, Real | torch.SymFloat | torch.SymInt)
    ):
        raise TypeError(f"{name} must be a number; got {type(value).__name__}")
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ValueError(f"{name} must be finite; got a whole number beyond the floats")
    if not above < value < math.inf:
        wanted = "finite" if above == -math.inf else f"finite and above {above:g}"
        raise ValueError(f"{name} must be {wanted}; got {value}")


Look = tuple[Gate, float, float, int]
"""A gate whose values are worth a look, what they must lie between, and its number of axes if it holds so few numbers
that one by one is quicker than a reduction, else 0."""

_SEEN: dict[tuple[Any, ...], list[Look]] = {}
"""Structures of calls that passed, and what is to be looked at: a loop asks the same at every token."""

_LAST: dict[Rule, tuple[tuple[Any, ...], list[Look]]] = {}
"""The newest of them, found without a hash."""

_REAL = frozenset((Tensor, torch.nn.Parameter))


def check_inputs(
    rule: Rule, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: State, cu_seqlens: Tensor | None
) -> Sequence[Look]:
    """Check the tensors of a call: types, shapes, and (in eager mode) values; return which of these were looked at."""
    packing = (cu_seqlens.dtype, cu_seqlens.shape) if isinstance(cu_seqlens, Tensor) else cu_seqlens
    key, looks = _structure(rule, (q, k, v, *gates.values()), state, packing)
    if looks is None:
        sizes = _check_tokens(rule, q, k, v, gates, rule.axes)
        rows = sizes["B"]
        if cu_seqlens is not None:
            check_packing(cu_seqlens, sizes["B"])
            rows = cu_seqlens.shape[0] - 1
        _check_state(rule, state, sizes, rows, q, "the initial state")
    if not (
        (key is None and torch.compiler.is_compiling())
        or _C._are_functorch_transforms_active()
        or _C._len_torch_dispatch_stack()
    ):
        if looks is None:
            looks = [_look(gate, gates[gate.name]) for gate in rule.gates if _has_values(gates[gate.name])]
            _remember(rule, key, looks)
        inside = None
        if cu_seqlens is not None and _readable(cu_seqlens):
            inside = check_bounds(cu_seqlens, q.shape[1])
        check_values(looks, gates, inside)
        if rule.grows and state is not None:
            _check_lengths(rule, state)
    return looks or ()


def check_values(looks: Sequence[Look], gates: Gates, inside: slice | None = None) -> None:
    """Check the numbers in gates, those of tokens that lie inside of all packed sequences."""
    for gate, low, high, few in looks:
        value = gates[gate.name]
        if inside is not None and "T" in gate.axes:
            value = value[:, inside]  # what lies outside may be anything
        if type(value) in _REAL and not (few and _all_between(low, high, value, few)):
            _check_values(gate, low, high, value)


def check_token(rule: Rule, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: State) -> None:
    """Check the tensors of one token: types and shapes."""
    key, looks = _structure(rule, (q, k, v, *gates.values()), state, "token")
    if looks is None:
        axes = {name: _without_time(axes) for name, axes in rule.axes.items()}
        sizes = _check_tokens(rule, q, k, v, gates, axes)
        _check_state(rule, state, sizes, sizes["B"], q, "the state")
        _remember(rule, key, [])


def check_overwrite(rule: Rule, inputs: Sequence[Tensor | None], state: State, overwrite_state: bool) -> None:
    """Check that a state's memory may take the next one."""
    if overwrite_state is not True:
        raise TypeError(f"overwrite_state must be True or False; got {overwrite_state!r:.40}")
    if rule.grows:
        raise ValueError(f"overwrite_state must be False for {rule.name}, whose state grows; got True")
    states = rule.state_tensors(state)
    if torch.is_grad_enabled() and _C._any_requires_grad(*inputs, *states):
        raise ValueError("overwrite_state must be False where a gradient is recorded; got True. Use torch.no_grad().")
    if any(x is y for x, y in combinations(states, 2)):
        raise ValueError(f"overwrite_state wants a tensor each for {', '.join(rule.states)}; got one twice. Clone it.")
    wide = compute_dtype(inputs[0].dtype)  # pyright: ignore[reportOptionalMemberAccess]
    for x in states:
        if not x.is_contiguous() or (x.dtype is not wide and x.is_floating_point()) or x.is_neg():
            raise ValueError(f"overwrite_state wants a contiguous state of {wide}; got one of {_word(x)}, strides "
                             f"{list(x.stride())}. Take the state that a step returned, or None.")  # fmt: skip


def _structure(
    rule: Rule, tensors: tuple[Any, ...], state: State, more: object
) -> tuple[tuple[Any, ...] | None, list[Look] | None]:
    """Return what the checks look at (None while tracing, or if it has no hash), and what was found if it passed."""
    if torch.compiler.is_compiling():
        return None, None
    try:
        states = () if state is None else (state,) if rule.state_type is None else state
        key = (
            rule,
            more,
            type(states),
            *[x if x is None else (x.shape, x.dtype, x.is_cpu or x.device) for x in (*tensors, *states)],
        )
        last = _LAST.get(rule)
        if last is not None and last[0] == key:
            return last
        looks = _SEEN.get(key)
        if looks is not None:
            _LAST[rule] = key, looks
        return key, looks
    except (AttributeError, TypeError):  # not a tensor, or a symbolic shape
        return None, None


def _remember(rule: Rule, key: tuple[Any, ...] | None, looks: list[Look]) -> None:
    if key is not None:
        if len(_SEEN) > 4096:
            _SEEN.clear()
        _SEEN[key] = looks
        _LAST[rule] = key, looks


def _without_time(axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis != "T")


def _check_tokens(
    rule: Rule, q: Tensor, k: Tensor, v: Tensor, gates: Gates, axes: dict[str, tuple[str, ...]]
) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, value in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, value)
        if value.dtype != q.dtype:
            raise TypeError(f"q, k and v must share a dtype; got q {_word(q)}, {name} {_word(value)}. "
                            f"Convert with {name}.to({q.dtype}).")  # fmt: skip
        _check_device(name, value, q)
        check_shape(name, value, axes[name], sizes)
    if rule.grouped:
        _check_multiple("q", sizes["Q"], "k", sizes["H"])
    else:
        _check_multiple("v", sizes["G"], "q and k", sizes["H"])
    for axis in ("K", "V", "n"):
        if sizes.get(axis, 1) < 1:
            raise ValueError(f"{axis} must be at least 1; got {sizes[axis]}")
    for gate in rule.gates:
        value = gates[gate.name]
        if value is None and not gate.optional:
            raise ValueError(f"{rule.name} needs the gate {gate.name!r}; got None")
        if value is not None:
            check_tensor(gate.name, value)
            if value.dtype != q.dtype and value.dtype != torch.float32:
                wide = "" if q.dtype == torch.float32 else " or float32"
                raise TypeError(f"{gate.name} must have q's dtype {_word(q)}{wide}; got {_word(value)}")
            _check_device(gate.name, value, q)
            check_shape(gate.name, value, gate.axes if "T" in axes["q"] else _without_time(gate.axes), sizes)
    return sizes


def _check_device(name: str, value: Tensor, q: Tensor) -> None:
    if value.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}; got {value.device}")


def _check_multiple(name: str, heads: int, other: str, fewer: int) -> None:
    if fewer < 1 or heads % fewer:
        raise ValueError(f"{name} must have a multiple of {other}'s heads; got {heads} and {fewer}")


def _check_state(rule: Rule, state: State, sizes: dict[str, int], rows: int, q: Tensor, words: str) -> None:
    if state is None:
        return
    names = list(rule.states)
    if rule.state_type is not None and (not isinstance(state, tuple) or len(state) != len(names)):
        raise TypeError(f"the state of {rule.name} must be {rule.state_type.__name__}({', '.join(names)}); "
                        f"got {type(state).__name__}")  # fmt: skip
    sizes = {**sizes, "N": rows}
    for (name, axes), tensor in zip(rule.states.items(), rule.state_tensors(state), strict=True):
        label = words if rule.state_type is None else f"{words}'s {name}"
        if axes:
            check_tensor(label, tensor)
        elif not isinstance(tensor, Tensor) or tensor.is_floating_point():
            raise TypeError(f"{label} must be an integer tensor")
        check_shape(label, tensor, ("N", *axes), sizes)
        _check_device(label, tensor, q)


def check_packing(cu_seqlens: Tensor, rows: int) -> None:
    """Check the type and shape of packed sequences' bounds in a batch of so many rows."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = _word(cu_seqlens) if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens must be an int32 or int64 tensor of the N+1 bounds of packed sequences; got {got}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must have shape [N+1] with N at least 1; got {list(cu_seqlens.shape)}")
    if rows != 1:
        raise ValueError(f"cu_seqlens packs sequences in one row: B must be 1; got B={rows}")


def _check_lengths(rule: Rule, state: State) -> None:
    tensors = dict(zip(rule.states, rule.state_tensors(state), strict=True))
    room = next(x.shape[1] for x, axes in zip(tensors.values(), rule.states.values(), strict=True) if "S" in axes)
    for name, counts in tensors.items():
        if not rule.states[name] and _readable(counts) and not 0 <= counts.min().item() <= counts.max().item() <= room:
            raise ValueError(f"the state's {name} must lie in [0, S={room}]; got {counts.tolist()[:8]}")


def check_bounds(cu_seqlens: Tensor, length: int) -> slice:
    """Check the values of packed sequences' bounds, and return what they span."""
    bounds = cu_seqlens.tolist()
    if bounds[0] < 0 or bounds[-1] > length or any(b < a for a, b in pairwise(bounds)):
        raise ValueError(f"cu_seqlens must rise from at least 0 to at most T={length}; got {bounds[:8]}"
                         f"{'...' if len(bounds) > 8 else ''}")  # fmt: skip
    return slice(bounds[0], bounds[-1])


def _look(gate: Gate, value: Tensor) -> Look:
    low, high = (gate.low, gate.high) if gate.enforced else (-math.inf, math.inf)
    return gate, low, high, value.ndim if value.numel() <= 64 else 0


def _all_between(low: float, high: float, value: Tensor, axes: int) -> bool:
    numbers = value.tolist()
    for _ in range(axes - 1):
        numbers = numbers[0] if len(numbers) == 1 else list(chain.from_iterable(numbers))
    for number in numbers:
        if not low <= number <= high:
            return False
    return True


def _check_values(gate: Gate, low: float, high: float, value: Tensor) -> None:
    if value.numel() == 0:  # nothing is left inside of the packed sequences
        return
    largest = value.max().item()
    smallest = value.min().item() if low > -math.inf else low
    if math.isnan(largest):
        raise no_number(gate.name)
    if largest > high or smallest < low:
        got = f"a maximum of {largest:g}" if largest > high else f"a minimum of {smallest:g}"
        cure = " It is the natural log of the decay: pass decay.log(), or clamp(max=0)." if gate.name == "g" else ""
        raise ValueError(f"{gate.name} must {gate.bounds}; got {got}.{cure}")


def _readable(tensor: Tensor) -> bool:
    return type(tensor) in _REAL and _has_values(tensor)


def _has_values(tensor: Tensor | None) -> bool:
    """Whether there is something to look at: the tensor is not left out, not empty, and has more than a shape."""
    return tensor is not None and not tensor.is_meta and tensor.numel() > 0


def _word(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_field(name: str, kind: Any, value: object) -> None:  # ruff: ignore[any-type] - annotations are strings here
    """Check a field of numbers or words by its annotation; TypeError if it is of another type."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    fits = {
        "int": whole,
        "int | None": whole or value is None,
        "float": whole or isinstance(value, float),
        "Precision": isinstance(value, str),
    }[kind]
    if not fits:
        words = {"int": "a whole number", "int | None": "a whole number or None", "float": "a number"}
        raise TypeError(f"{name} must be {words.get(kind, 'a name')}; got {value!r}")


def check_least(name: str, value: float, least: int) -> None:
    """Check that a number is at least ``least`` and finite; ValueError if not."""
    if not least <= value < math.inf:
        raise ValueError(f"{name} must be at least {least}{' and finite' if value == math.inf else ''}; got {value}")
