"""The compiled library: where it is, and a family's operator through it.

The library is plain C, opened by its path: a call is one packed structure and one address, which costs less than any
binding of tensors (1.3 µs) and ties it to no version of Python or torch.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from innerloop.shapes import compute_dtype

_PATH = Path(__file__).parent / "cpu" / "innerloop_cpu.so"
_ELEMENTS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_TENSOR = "6q"
_LAYOUT = struct.Struct(f"=12q d {5 * _TENSOR} 3q {_TENSOR} 8q")
_ABSENT = (0,) * 6
_NO_GRADIENTS = (0,) * 14
_ONE_THREAD = 1 << 19
"""Multiplications below which a second thread costs more than it brings."""

CHUNK = 32
"""Tokens a chunk, unless fewer were asked for: what fits beside the memory in a core's cache."""


def _open() -> tuple[Any, str]:
    """Return the library's function and an empty string, or None and why not."""
    if os.environ.get("INNERLOOP_BACKEND") == "torch":
        return None, "INNERLOOP_BACKEND=torch turns the native kernels off"
    if not _PATH.exists():
        return None, "this installation has no native kernels: there was no compiler when it was built"
    try:
        library = ctypes.CDLL(str(_PATH))
    except OSError as error:
        return None, f"the native kernels do not load: {error}"
    library.innerloop_call_size.restype = ctypes.c_int64
    if library.innerloop_call_size() != _LAYOUT.size:
        return None, "the native kernels are of another version; install again"
    library.innerloop_run.argtypes = (ctypes.c_char_p, ctypes.c_int64)
    library.innerloop_run.restype = ctypes.c_int64
    library.innerloop_isa.restype = ctypes.c_char_p
    return library, ""


_LIBRARY, _MISSING = _open()


def missing() -> str:
    """Return why there are no native kernels, or an empty string."""
    return _MISSING


def instruction_set() -> str:
    """Return the instruction set that the kernels use here, or an empty string."""
    return "" if _LIBRARY is None else _LIBRARY.innerloop_isa().decode()


class Native:
    """A family with one matrix for its state, through the library.

    Args:
        corrects: 0 if a pair is added, 1 for the delta rule, 2 for the delta rule at the rate of its proximal step.
        gates: Which gates it takes, of ``g`` and ``beta``, in order.
    """

    def __init__(self, corrects: int, gates: tuple[str, ...]) -> None:
        """Say which family it is."""
        self.corrects = corrects
        self.gates = gates
        self.present = _LIBRARY is not None

    def forward(self, inputs: Sequence[Any], options: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Return ``o`` and the memory after the last token."""
        q, _, v = inputs[:3]
        cu_seqlens, dtype = options[0], compute_dtype(v.dtype)
        shape = (*v.shape[:2], v.shape[2], v.shape[3])
        # Nobody writes what lies outside of packed sequences.
        out = v.new_empty(shape) if cu_seqlens is None else v.new_zeros(shape)
        rows = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        final = v.new_empty((rows, v.shape[2], q.shape[3], v.shape[3]), dtype=dtype)
        head, keep = self._head(inputs, options, rows)
        _run(False, *head, out.data_ptr(), final.data_ptr(), *_NO_GRADIENTS)
        del keep
        return out, final

    def token(
        self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Any], state: Tensor | None, scale: float, unit: bool
    ) -> tuple[Tensor, Tensor]:
        """Return what one token ``[B, G, .]`` reads, and the memory after it; no gradient is recorded."""
        rows, heads, width = v.shape
        _, key_heads, key_width = k.shape
        dtype = compute_dtype(v.dtype)
        out = torch.empty((rows, heads, width), dtype=v.dtype)
        final = torch.empty((rows, heads, key_width, width), dtype=dtype)
        tensors = [None if x is None else _resolved(x) for x in (q, k, v, gates.get("g"), gates.get("beta"))]
        before = None if state is None else _matrix(state, dtype)
        work = rows * heads * width * key_width
        _run(
            False, self.corrects, rows, 1, key_heads, heads, key_width, width, 0, 1,
            1 if work < _ONE_THREAD else torch.get_num_threads(), unit, dtype is torch.float64, scale,
            *_strided_token(tensors[0]), *_strided_token(tensors[1]), *_strided_token(tensors[2]),
            *_strided_token(tensors[3]), *_strided_token(tensors[4]), _address(before), out.data_ptr(),
            final.data_ptr(), *_NO_GRADIENTS,
        )  # fmt: skip
        return out, final

    def backward(
        self, inputs: Sequence[Any], options: Sequence[Any], grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> list[Tensor]:
        """Return the gradients of those inputs that need one."""
        q, k, v = inputs[:3]
        cu_seqlens, dtype = options[0], compute_dtype(v.dtype)
        rows = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        make = v.new_empty if cu_seqlens is None else v.new_zeros
        shared = v.shape[2] != k.shape[2]
        wide = dtype if shared else v.dtype
        keys = (*v.shape[:3], q.shape[3])
        found: list[Tensor | None] = [make(keys, dtype=wide) if need else None for need in needs[:2]]
        found.append(make(v.shape) if needs[2] else None)
        found += [make(v.shape[:3], dtype=dtype) if need else None for need in needs[3:-1]]
        found.append(v.new_empty((rows, v.shape[2], q.shape[3], v.shape[3]), dtype=dtype) if needs[-1] else None)
        head, keep = self._head(inputs, options, rows)
        slope = v.new_zeros(()).expand(v.shape) if grads[0] is None else _resolved(grads[0])
        end = None if grads[1] is None else _matrix(grads[1], dtype)
        by_gate = dict(zip(self.gates, found[3:-1], strict=True))
        _run(
            True, *head, 0, 0, *_strided(slope), _address(end), *map(_address, found[:3]),
            *(_address(by_gate.get(name)) for name in ("g", "beta")), _address(found[-1]), _ELEMENTS[wide],
        )  # fmt: skip
        del keep
        if shared:
            found[:2] = [None if x is None else x.unflatten(2, (k.shape[2], -1)).sum(3) for x in found[:2]]
        return [
            x if x.dtype == given.dtype else x.to(given.dtype)
            for x, given in zip(found, inputs, strict=True)
            if x is not None
        ]

    def _head(self, inputs: Sequence[Any], options: Sequence[Any], rows: int) -> tuple[tuple[Any, ...], Any]:
        """Return the call's fields up to the state, and what must live until it is over."""
        q, k, v, *gates, state = inputs
        cu_seqlens, scale, unit, chunk = options[:4]
        dtype = compute_dtype(v.dtype)
        named = dict(zip(self.gates, gates, strict=True))
        tensors = [None if x is None else _resolved(x) for x in (q, k, v, named.get("g"), named.get("beta"))]
        bounds = None if cu_seqlens is None else cu_seqlens.to(torch.int64).contiguous()
        state = None if state is None else _matrix(state, dtype)
        work = v.numel() * k.shape[3]
        head = (
            self.corrects, rows, v.shape[1], k.shape[2], v.shape[2], k.shape[3], v.shape[3], _address(bounds),
            min(chunk, CHUNK), 1 if work < _ONE_THREAD else torch.get_num_threads(), unit, dtype == torch.float64,
            scale, *(field for x in tensors for field in _strided(x)), _address(state),
        )  # fmt: skip
        return head, (tensors, bounds, state)


def _run(backward: bool, *fields: float) -> None:
    failed = _LIBRARY.innerloop_run(_LAYOUT.pack(*fields), backward)
    if failed == 1:
        raise ValueError("cu_seqlens must rise from at least 0 to at most T")
    if failed:
        raise MemoryError("no memory for a kernel's scratch")


def _resolved(x: Tensor) -> Tensor:
    return x.resolve_neg() if x.is_neg() else x


def _matrix(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (_resolved(x) if x.dtype is dtype else _resolved(x).to(dtype)).contiguous()


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _strided(x: Tensor | None) -> tuple[int, ...]:
    if x is None:
        return _ABSENT
    strides = x.stride()
    return (x.data_ptr(), *strides, *(0,) * (4 - len(strides)), _ELEMENTS[x.dtype])


def _strided_token(x: Tensor | None) -> tuple[int, ...]:
    if x is None:
        return _ABSENT
    row, head, *column = x.stride()
    return (x.data_ptr(), row, 0, head, column[0] if column else 0, _ELEMENTS[x.dtype])
