"""Time against the length of a sequence, and a token's against the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from innerloop.bench.compare import Pace, compare
from innerloop.bench.workload import Workload

Curve = list[tuple[int, float]]
"""Size and median seconds."""
LENGTHS = tuple(2**power for power in range(6, 17))
BATCHES = (1, 2, 4, 8, 16, 32, 64)
_PATIENCE = 1.5
"""Seconds after which someone's next point, which takes at least twice as long, is left out."""


def curves(
    rule: str,
    pace: Pace,
    *,
    lengths: Sequence[int] = LENGTHS,
    batches: Sequence[int] = BATCHES,
    told: Callable[[str], None] = lambda words: None,
    **shape: int,
) -> dict[str, dict[str, Curve]]:
    """Time a rule and everyone who can run it at every size, until they take too long.

    Args:
        rule: Its name.
        pace: How much care to take with a point.
        lengths: Of sequences, rising.
        batches: Of single tokens, rising.
        told: Called with each point's name as it begins.
        **shape: Sizes of the workload other than the one that changes.

    Returns:
        ``forward``, ``both`` and ``decode``: by name, ours always to the end; ``decode`` has ``floor``, the time in
        which the state is read and written once.
    """
    quick = Pace(pace.seconds / 3, memory=False)
    found = {}
    for way in ("forward", "both"):
        works = (Workload(rule, way, **{**shape, "T": length}) for length in lengths)
        found[way] = _curve(works, ("torch", "transformers", "sdpa"), quick, "T", told)
    works = (Workload(rule, "decode", **{**shape, "B": batch}) for batch in batches)
    found["decode"] = _curve(works, ("torch", "transformers"), quick, "B", told)
    return found


def _curve(
    works: Iterable[Workload], names: Sequence[str], pace: Pace, axis: str, told: Callable[[str], None]
) -> dict[str, Curve]:
    points: dict[str, Curve] = {}
    going = list(names)
    for workload in works:
        told(str(workload))
        decode = workload.way == "decode"
        compared: dict[str, Any] = compare(workload, going, pace, rates=decode)
        size = getattr(workload, axis)
        for name, contender in compared["contenders"].items():
            points.setdefault(name, []).append((size, contender["times"]["median"]))
        if decode:
            points.setdefault("floor", []).append((size, compared["floor"]))
        slow = {name for name, curve in points.items() if curve[-1][1] > _PATIENCE}
        going = [name for name in going if name not in slow and name not in compared["absent"]]
    return points
