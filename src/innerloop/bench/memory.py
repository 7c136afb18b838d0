"""What a contender's call takes at its highest, measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from innerloop.bench.workload import Workload

_STATUS = Path("/proc/self/status")


def peak(name: str, workload: Workload, *, threads: int, limit: float = 300.0) -> int | None:
    """Return the bytes that one call adds to what its inputs take; None where it cannot be told.

    Args:
        name: Of the contender.
        workload: What it runs.
        threads: How many.
        limit: Seconds after which the process is ended.

    Returns:
        Bytes, None if the system does not say, or the process failed or was ended.
    """
    if not _STATUS.exists():
        return None
    words = json.dumps({"name": name, "workload": asdict(workload), "threads": threads})
    # The allocator gives memory back at once: what one run kept for the next would hide in the baseline.
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", f"from {__name__} import _measure; _measure()"]
    try:
        done = subprocess.run(
            command, input=words, env=environment, capture_output=True, text=True, timeout=limit, check=True
        )
    except (subprocess.SubprocessError, OSError):
        return None
    return int(done.stdout)


def _measure() -> None:
    """Read what to run from the standard input, run it, and print its peak."""
    import torch

    from innerloop.bench.contenders import Contender

    asked: dict[str, Any] = json.loads(sys.stdin.read())
    torch.set_num_threads(asked["threads"])
    workload = Workload(**asked["workload"])
    # Libraries, threads and operators are set up by something small.
    Contender(asked["name"], workload.at(T=64))()
    contender = Contender(asked["name"], workload)
    before = _field("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts anew
    except OSError:
        before = max(before, _field("VmHWM"))
    contender()
    print(max(0, _field("VmHWM") - before))


def _field(name: str) -> int:
    for line in _STATUS.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"the system does not say {name}")
