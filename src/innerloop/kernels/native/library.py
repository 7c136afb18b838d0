"""The compiled library: where it is, and how a call reaches it.

The library is plain C, opened by its path: a call is one packed structure and one address, which costs less than any
binding of tensors (1.3 µs) and ties it to no version of Python or torch. ``kernels/cpu/call.h`` has the structures.
"""

from __future__ import annotations

import ctypes
import os
import struct
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from innerloop.shapes import compute_dtype

_PATH = Path(__file__).parent.parent / "cpu" / "innerloop_cpu.so"
ELEMENTS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
HEADER, HEADER_SIZE = "5q", 5
"""Of every call: jobs, threads, sequences, length, address of the bounds."""
TENSOR, TENSOR_SIZE = "6q", 6
"""What ``strided`` returns."""
ABSENT = (0,) * 6
_NAMED = {"INNERLOOP_BACKEND": ("torch",), "INNERLOOP_ISA": ("plain", "avx2", "avx512", "avx512_bf16")}
"""What is read of the environment, and its values."""
LARGE = 4 << 20
"""Bytes from which memory comes in large pages."""
_ONE_THREAD = 1 << 19
"""Multiplications below which a second thread costs more than it brings."""


def _open() -> tuple[Any, str]:
    """Return the library and an empty string, or None and why not."""
    for name, known in _NAMED.items():
        given = os.environ.get(name)
        if given and given not in known:
            why = f"{name} must be {' or '.join(known)}, or unset; got {given!r:.40}"
            warnings.warn(f"{why}: the native kernels are off", stacklevel=2)
            return None, why
    if os.environ.get("INNERLOOP_BACKEND") == "torch":
        return None, "INNERLOOP_BACKEND=torch turns the native kernels off"
    named = os.environ.get("INNERLOOP_LIBRARY")
    if named and not Path(named).exists():
        return None, f"INNERLOOP_LIBRARY names no file: {named}"
    path = Path(named) if named else _PATH
    if not path.exists():
        return None, "this installation has no native kernels: there was no compiler when it was built"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"the native kernels do not load: {error}"
    if not hasattr(library, "innerloop_series"):
        return None, "the native kernels are of another version; install again"
    library.innerloop_call_size.argtypes = (ctypes.c_int64,)
    library.innerloop_call_size.restype = ctypes.c_int64
    library.innerloop_run.argtypes = (ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64)
    library.innerloop_run.restype = ctypes.c_int64
    library.innerloop_again.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    library.innerloop_again.restype = ctypes.c_int64
    library.innerloop_series.argtypes = (ctypes.c_char_p, ctypes.c_int64)
    library.innerloop_series.restype = ctypes.c_int64
    library.innerloop_scratch.argtypes = (ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64)
    library.innerloop_scratch.restype = ctypes.c_int64
    library.innerloop_large_pages.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    library.innerloop_isa.restype = ctypes.c_char_p
    return library, ""


_LIBRARY, _MISSING = _open()


Plan = Callable[..., None]
Prepared = TypeVar("Prepared")


class Core:
    """One of the library's cores: packs a call and runs it.

    Args:
        number: Its place in the library's table.
        layout: The fields of its structure after the header, as ``struct`` names them.
    """

    def __init__(self, number: int, layout: str) -> None:
        """Compare the layout with the library's own."""
        self._number = number
        self._layout = struct.Struct(f"={HEADER} {layout}")
        self.present = _LIBRARY is not None and _LIBRARY.innerloop_call_size(number) == self._layout.size
        if _LIBRARY is not None and not self.present:
            _report("the native kernels are of another version; install again")

    def run(self, way: int, *fields: float) -> None:
        """Compute values (``way`` 0) or gradients (1) into the memory that the fields name."""
        failed = _LIBRARY.innerloop_run(self._number, self._layout.pack(*fields), way)
        if failed:
            _refuse(failed)

    def plan(self, way: int, places: Sequence[int], *fields: float) -> Plan:
        """Return a function that runs this call again with other addresses, in the fields counted by ``places``."""
        call = self._layout.pack(*fields)
        head = struct.pack(f"={4 + len(places)}q", self._number, way, len(call) // 8, len(places), *places)
        plan, pack = head + call, struct.Struct(f"={len(places)}q").pack

        def again(*addresses: int) -> None:
            failed = _LIBRARY.innerloop_again(plan, pack(*addresses))
            if failed:
                _refuse(failed)

        return again

    def written(self, way: int, *fields: float) -> bytes:
        """Return a call as ``run_series`` takes it; the fields name all of its memory."""
        call = self._layout.pack(*fields)
        return struct.pack("=3q", self._number, way, len(call) // 8) + call

    def trail_size(self, *fields: float) -> int:
        """Return how many bytes the values of such a call can leave for its gradients."""
        return _LIBRARY.innerloop_scratch(self._number, self._layout.pack(*fields), 2)


def run_series(calls: bytes, count: int) -> None:
    """Run calls that ``Core.written`` wrote, one behind another."""
    failed = _LIBRARY.innerloop_series(calls, count)
    if failed:
        _refuse(failed)


def _refuse(failed: int) -> None:
    if failed == 1:
        raise ValueError("cu_seqlens must rise from at least 0 to at most T")
    raise MemoryError("no memory for a kernel's scratch")


class Recent(Generic[Prepared]):
    """What was prepared for the newest structures of calls; a loop asks for the same at every turn."""

    _MOST = 64

    def __init__(self) -> None:
        """Begin with nothing."""
        self._found: list[tuple[object, Prepared]] = []

    def get(self, key: object) -> Prepared | None:
        """Return what was put in under an equal key, or None."""
        for known, value in self._found:
            if known == key:
                return value
        return None

    def put(self, key: object, value: Prepared) -> Prepared:
        """Keep a value and return it."""
        self._found = [(key, value), *self._found[: self._MOST - 1]]  # a new list: other threads read the old one
        return value


def _report(why: str) -> None:
    global _MISSING
    _MISSING = why


def missing() -> str:
    """Return why there are no native kernels, or an empty string."""
    return _MISSING


def instruction_set() -> str:
    """Return the instruction set that the kernels use here, or an empty string."""
    return "" if _LIBRARY is None else _LIBRARY.innerloop_isa().decode()


def threads_for(work: int) -> int:
    """Return how many threads so many multiplications deserve: torch's own number, or one."""
    return 1 if work < _ONE_THREAD else torch.get_num_threads()


def contiguous(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` in one piece and in the precision of arithmetic."""
    if x.is_neg():
        x = x.resolve_neg()
    return (x if x.dtype is dtype else x.to(dtype)).contiguous()


def as_read(inputs: Sequence[Tensor | None], bounds: Tensor | None, states: int) -> list[Any]:
    """Return an operator's inputs, so many states last, and the bounds of packed sequences, as kernels read them."""
    held: list[Any] = [x if x is None or not x.is_neg() else x.resolve_neg() for x in inputs]
    for i in range(-states, 0):
        if held[i] is not None:
            held[i] = contiguous(held[i], compute_dtype(held[2].dtype))
    held.append(None if bounds is None else bounds.to(torch.int64).contiguous())
    return held


def structure(held: Sequence[Any]) -> list[Any]:
    """Return what else a packed call says of inputs whose shapes agree with each other."""
    bounds = held[-1]
    return [torch.get_num_threads(), held[1].shape, held[2].shape, bounds if bounds is None else bounds.shape,
            *[x if x is None else (x.stride(), x.dtype) for x in held]]  # fmt: skip


def addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return where the memory of each tensor begins, 0 for None."""
    return [0 if x is None else x.data_ptr() for x in tensors]


def outline(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of that shape without memory, for ``empty``."""
    return torch.empty((), dtype=dtype).expand(tuple(shape))


def empty(like: Tensor) -> Tensor:
    """Return a new contiguous tensor, in large pages if it is large: small ones cost more than what fills them."""
    new = torch.empty_like(like, memory_format=torch.contiguous_format)
    if new.nbytes >= LARGE:
        _LIBRARY.innerloop_large_pages(new.data_ptr(), new.nbytes)
    return new


def strided(x: Tensor | None) -> tuple[int, ...]:
    """Return the fields of ``[B, T, heads, width]`` or ``[B, T, heads]``, of an absent tensor for None."""
    if x is None:
        return ABSENT
    strides = x.stride()
    return (x.data_ptr(), *strides, *(0,) * (4 - len(strides)), ELEMENTS[x.dtype])
