"""What this machine is, and what it can do: its rate of products, its memory's speed."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from innerloop._version import __version__
from innerloop.bench.contenders import transformers_version
from innerloop.kernels.native import instruction_set, missing

Work = Callable[[], object]


def describe() -> dict[str, Any]:
    """Return what a reader of the numbers must know of the machine; nothing names its owner."""
    return {
        "cpu": processor(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "memory_gb": round(_memory() / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers_version() or None,
        "innerloop": __version__,
        "instruction_set": instruction_set() or None,
        "no_kernels": missing() or None,
        "load": load(),
    }


def load() -> float | None:
    """Return the mean number of processes that wanted a core over the last minute; None where nobody counts."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def processor() -> str:
    """Return the processor's model, with its family where the name alone says little."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    fields = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name") or platform.machine()
    if not re.search(r"\d", name) and "cpu family" in fields:
        name += f" family {fields['cpu family']} model {fields['model']}"
    return name


def file_name(machine: dict[str, Any]) -> str:
    """Return a file name from processor and cores."""
    words = re.sub(r"\((r|tm)\)|\bcpu\b|@.*", " ", str(machine["cpu"]).lower())
    return "-".join((*re.findall(r"[a-z0-9.]+", words), f"{machine['cores']}-cores.json"))


def _memory() -> int:
    names = os.sysconf_names if hasattr(os, "sysconf_names") else {}
    if "SC_PHYS_PAGES" not in names:
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def products(dtype: torch.dtype = torch.float32) -> dict[str, tuple[Work, float]]:
    """Return the products that a kernel's arithmetic is held against, and how many operations each is.

    ``large`` is one product of two square matrices, the machine at its best; ``small`` is many of the size that a chunk
    makes.
    """
    n, many, (rows, inner, columns) = 1024, 64, (64, 128, 128)
    a, b = torch.randn(2, n, n, dtype=dtype).unbind(0)
    c, d = torch.randn(many, rows, inner, dtype=dtype), torch.randn(many, inner, columns, dtype=dtype)
    to, into = torch.empty_like(a), torch.empty(many, rows, columns, dtype=dtype)
    return {
        "large": (lambda: torch.mm(a, b, out=to), 2.0 * n**3),
        "small": (lambda: torch.bmm(c, d, out=into), 2.0 * many * rows * inner * columns),
    }


def in_place(count: int) -> Work:
    """Return a work that reads and writes so many bytes of float32 once, where they lie."""
    x = torch.randn(max(1, count // 4))
    return lambda: x.neg_()
