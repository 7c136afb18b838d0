"""What a busy neighbour costs, by how idle threads wait: in processes of their own, for the choice is made once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from innerloop.bench.workload import Workload

POLICIES = ("", "active", "passive")
"""What ``OMP_WAIT_POLICY`` is set to; empty leaves it unset."""
WORKLOAD = Workload("gated_delta_rule", "both", B=8, T=256, H=4, K=64)


def beside_neighbours(threads: int, workload: Workload = WORKLOAD, seconds: float = 1.5) -> list[dict[str, Any]]:
    """Time a workload alone and beside a process that keeps one core busy, for each way to wait.

    Args:
        threads: How many the workload takes.
        workload: What to run.
        seconds: For each measurement.

    Returns:
        One row for each: ``policy``, ``busy``, the medians ``ours`` and ``mm``, torch's own product in turn with ours.
    """
    rows = []
    for busy in (False, True):
        # It ends with us, also if we die.
        neighbour = subprocess.Popen([sys.executable, "-c", _SPIN], stdin=subprocess.PIPE) if busy else None
        try:
            for policy in POLICIES:
                times = _measured(policy, threads, workload, seconds)
                rows.append({"policy": policy or "unset", "busy": busy, **times})
        finally:
            if neighbour is not None:
                neighbour.kill()
                neighbour.communicate()
    return rows


_SPIN = """
import os, threading
def leave():
    os.read(0, 1)
    os._exit(0)
threading.Thread(target=leave, daemon=True).start()
while True:
    pass
"""


def _measured(policy: str, threads: int, workload: Workload, seconds: float) -> dict[str, float]:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_WAIT_POLICY": policy} if policy else {}
    words = json.dumps({"workload": asdict(workload), "threads": threads, "seconds": seconds})
    command = [sys.executable, "-c", f"from {__name__} import _measure; _measure()"]
    done = subprocess.run(command, input=words, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def _measure() -> None:
    """Read what to run from the standard input, and print the medians."""
    import torch

    from innerloop.bench.contenders import Contender
    from innerloop.bench.machine import products
    from innerloop.bench.measure import interleaved

    asked = json.loads(sys.stdin.read())
    torch.set_num_threads(asked["threads"])
    works = {"ours": Contender("innerloop", Workload(**asked["workload"])), "mm": products()["large"][0]}
    times = interleaved(works, seconds=asked["seconds"], rounds=200)
    print(json.dumps({name: found["median"] for name, found in times.items()}))
