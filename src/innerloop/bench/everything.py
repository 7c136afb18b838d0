"""Everything that is measured of a machine, as one JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from innerloop import rules
from innerloop.bench.compare import Pace, compare
from innerloop.bench.curves import curves
from innerloop.bench.machine import describe
from innerloop.bench.neighbours import beside_neighbours
from innerloop.bench.networks import NETWORK_ROWS
from innerloop.bench.rows import ROWS as MATRIX_ROWS
from innerloop.bench.rows import Row
from innerloop.bench.workload import Workload
from innerloop.experiments.runner import PACKAGE, commit_of

ROWS: tuple[Row, ...] = (*MATRIX_ROWS, *NETWORK_ROWS)
Told = Callable[[str], None]


def measure_everything(pace: Pace, told: Told, done: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure the table, every rule, the curves and the neighbours.

    Args:
        pace: How much care to take.
        told: Called with what begins.
        done: Called with each row of the table as it is known.

    Returns:
        Plain values, for a file and for the page.
    """
    result: dict[str, Any] = {"machine": describe(), "commit": commit_of(PACKAGE), "seed": 0}
    result["rows"] = measure_rows(ROWS, pace, told, done)
    result["rules"] = list(every_rule(pace, told))
    told("time against length and batch")
    result["curves"] = curves("gated_delta_rule", pace, told=told)
    told("busy neighbours")
    result["neighbours"] = beside_neighbours(torch.get_num_threads())
    return result


def measure_rows(
    rows: Sequence[Row], pace: Pace, told: Told, done: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Measure rows of the table; each names the commit that it was measured at."""
    found = []
    for row in rows:
        told(row.title)
        found.append({**row.measure(pace), "commit": commit_of(PACKAGE)})
        done(found[-1])
    return found


def every_rule(pace: Pace, told: Told) -> Iterator[dict[str, Any]]:
    """Time every rule of the list, natively where it is, and in its portable form."""
    quick = Pace(pace.seconds / 4, memory=False)
    for module in rules.ALL:
        told(f"{module.RULE.name}, every way")
        found: dict[str, Any] = {"rule": module.RULE.name}
        for way in ("forward", "both", "decode"):
            workload = Workload(module.RULE.name, way, T=1024, H=4, K=64)
            compared = compare(workload, ["torch"], quick, rates=False)
            found[way] = {name: x["times"]["median"] for name, x in compared["contenders"].items()}
            found["kernel"] = compared["kernel"]
        yield found
