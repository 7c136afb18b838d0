"""Times of several works that take turns, so that a disturbance meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

Work = Callable[[], object]
_SAMPLE = 5e-3
"""Seconds that a sample lasts at least: shorter works are repeated within it."""
_FEW = 3


def interleaved(works: Mapping[str, Work], *, seconds: float = 4.0, rounds: int = 21) -> dict[str, dict[str, Any]]:
    """Run works in turn and return what each takes.

    A round runs each work once. Works that take much of the time allowed by themselves sit out after three samples,
    their first run among them, while the others go on.

    Args:
        works: By name.
        seconds: To spend on all of them, roughly: three rounds are run whatever they take.
        rounds: At most.

    Returns:
        By name: ``median``, ``least``, the quartiles ``low`` and ``high``, all in seconds, and ``samples``.

    Example:
        >>> found = interleaved({"add": lambda: 1 + 1}, seconds=0.1)
        >>> found["add"]["least"] <= found["add"]["median"]
        True
    """
    times: dict[str, list[float]] = {}
    counts: dict[str, int] = {}
    for name, work in works.items():
        first = _seconds(work, 1)
        slow = first > seconds / (2 * _FEW)
        if not slow:  # it also warmed up
            first = _seconds(work, 1)
        counts[name] = max(1, round(_SAMPLE / max(first, 1e-9)))
        times[name] = [first] if slow else []
    begin = time.perf_counter()
    for turn in range(rounds):
        if turn >= _FEW and time.perf_counter() - begin > seconds:
            break
        # Who comes first changes from round to round: each work finds the caches that the one before left.
        order = list(works)[turn % len(works) :] + list(works)[: turn % len(works)]
        for name in order:
            found = times[name]
            if len(found) >= _FEW and found[0] > seconds / (2 * _FEW):
                continue
            found.append(_seconds(works[name], counts[name]))
    return {name: _summary(found) for name, found in times.items()}


def _seconds(work: Work, count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        work()
    return (time.perf_counter() - begin) / count


def _summary(times: list[float]) -> dict[str, Any]:
    low, median, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return {"median": median, "low": low, "high": high, "least": min(times), "samples": len(times)}
