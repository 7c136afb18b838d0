"""One workload, everyone who can run it, and what the machine does in the same minutes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from innerloop.bench.contenders import Absent, Contender, title
from innerloop.bench.machine import in_place, load, products
from innerloop.bench.measure import Work, interleaved
from innerloop.bench.memory import peak
from innerloop.bench.workload import Workload
from innerloop.checks import refusal
from innerloop.rule import get

Comparison = dict[str, Any]
"""Plain values: who took how long, how much memory, and how that stands to the machine's own rates."""


@dataclass(frozen=True)
class Pace:
    """How much care to take."""

    seconds: float = 4.0
    """A comparison may take, about; one run of a slow contender may take longer."""
    memory: bool = True
    """Whether to measure memory too, which takes a process for each contender."""


def compare(workload: Workload, names: Sequence[str], pace: Pace, *, rates: bool = True) -> Comparison:
    """Time a workload in this library and in others, interleaved in this process.

    Args:
        workload: What to run.
        names: Of :data:`~innerloop.bench.contenders.AGAINST`; ``innerloop`` runs always.
        pace: How much care to take.
        rates: Whether to time the machine's products (for a single token its memory) in between.

    Returns:
        ``contenders``, by name, each with ``title``, ``times``, ``ratio`` to ours, ``error`` against our answer and
        ``memory``; ``absent``, by name, why; ``rates``, ``share`` and ``floor`` of the machine.
    """
    runners, absent = _runners(workload, ("innerloop", *names))
    errors = _errors(runners)
    works: dict[str, Work] = dict(runners)
    measured = products(torch.float32) if workload.way != "decode" else {}
    if rates:
        works |= {name: work for name, (work, _) in measured.items()}
        if workload.way == "decode":
            works["in_place"] = in_place(workload.state_bytes())
    times = interleaved(works, seconds=pace.seconds)
    ours = times["innerloop"]["median"]
    contenders = {
        name: {
            "title": title(name, workload), "times": times[name], "ratio": times[name]["median"] / ours,
            "error": errors.get(name), "memory": peak_here(name, workload) if pace.memory else None,
        }
        for name in runners
    }  # fmt: skip
    found = {"workload": asdict(workload), "title": f"{workload.rule} {workload}", "contenders": contenders}
    found |= {"absent": absent, "kernel": not refusal(get(workload.rule)), "load": load()}
    if rates and workload.way == "decode":
        floor = times["in_place"]["median"]
        found |= {"floor": floor, "of_floor": ours / floor, "rates": {"in_place": 2 * workload.state_bytes() / floor}}
    elif rates:
        rate = {name: count / times[name]["median"] for name, (_, count) in measured.items()}
        flops = workload.flops()
        share = {name: flops / ours / x for name, x in rate.items()} if flops else {}
        found |= {"rates": rate, "flops": flops, "share": share}
    return found


def _runners(workload: Workload, names: Sequence[str]) -> tuple[dict[str, Contender], dict[str, str]]:
    runners, absent, call = {}, {}, workload.draw()
    for name in names:
        try:
            runners[name] = Contender(name, workload, call)
        except Absent as error:
            absent[name] = str(error)
    return runners, absent


def _errors(runners: dict[str, Contender]) -> dict[str, float]:
    """Return how far each answer is from ours; softmax attention answers something else."""
    want = runners["innerloop"].output().double()
    found = {}
    for name, runner in runners.items():
        if name not in ("innerloop", "sdpa"):
            found[name] = distance(runner.output(), want)
    return found


def distance(got: Tensor, want: Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    got, want = got.double().flatten(), want.double().flatten()
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-300))


def peak_here(name: str, workload: Workload) -> int | None:
    """Return the bytes that a contender takes on top of its inputs, with as many threads as here."""
    return peak(name, workload, threads=torch.get_num_threads())
