"""The compiled library: where it is, and how a call reaches it.

The library is plain C, opened by its path: a call is one packed structure and one address, which costs less than any
binding of tensors (1.3 µs) and ties it to no version of Python or torch. ``kernels/cpu/call.h`` has the structures.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_PATH = Path(__file__).parent.parent / "cpu" / "innerloop_cpu.so"
ELEMENTS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
HEADER = "5q"
"""Of every call: jobs, threads, sequences, length, address of the bounds."""
TENSOR = "6q"
"""What ``strided`` returns."""
ABSENT = (0,) * 6
_ONE_THREAD = 1 << 19
"""Multiplications below which a second thread costs more than it brings."""


def _open() -> tuple[Any, str]:
    """Return the library and an empty string, or None and why not."""
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
    library.innerloop_call_size.argtypes = (ctypes.c_int64,)
    library.innerloop_call_size.restype = ctypes.c_int64
    library.innerloop_run.argtypes = (ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64)
    library.innerloop_run.restype = ctypes.c_int64
    library.innerloop_isa.restype = ctypes.c_char_p
    return library, ""


_LIBRARY, _MISSING = _open()


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
        if failed == 1:
            raise ValueError("cu_seqlens must rise from at least 0 to at most T")
        if failed:
            raise MemoryError("no memory for a kernel's scratch")


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


def resolved(x: Tensor) -> Tensor:
    """Return ``x`` with its memory as it reads: no sign that is still to be applied."""
    return x.resolve_neg() if x.is_neg() else x


def contiguous(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` in one piece and in the precision of arithmetic."""
    return (resolved(x) if x.dtype is dtype else resolved(x).to(dtype)).contiguous()


def address(x: Tensor | None) -> int:
    """Return where the memory of ``x`` begins, 0 for None."""
    return 0 if x is None else x.data_ptr()


def strided(x: Tensor | None) -> tuple[int, ...]:
    """Return the fields of ``[B, T, heads, width]`` or ``[B, T, heads]``, of an absent tensor for None."""
    if x is None:
        return ABSENT
    strides = x.stride()
    return (x.data_ptr(), *strides, *(0,) * (4 - len(strides)), ELEMENTS[x.dtype])


def strided_token(x: Tensor | None) -> tuple[int, ...]:
    """Return the same of one token, ``[B, heads, width]`` or ``[B, heads]``."""
    if x is None:
        return ABSENT
    row, head, *column = x.stride()
    return (x.data_ptr(), row, 0, head, column[0] if column else 0, ELEMENTS[x.dtype])
