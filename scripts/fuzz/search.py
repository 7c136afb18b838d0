"""Many examples from one seed, and the smallest that fails."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from scripts.fuzz.example import Example, examples
from scripts.fuzz.trial import check


class Failed(Exception):
    """An example that failed, and how."""


def fuzz(count: int, number: int, names: Sequence[str]) -> int:
    """Run examples from this seed.

    Args:
        count: How many.
        number: The seed.
        names: Of the rules to draw from.

    Returns:
        How many ran.

    Raises:
        Failed: With the smallest failing example found.
    """
    ran, worst = 0, None

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(examples(names))
    def one(example: Example) -> None:
        nonlocal ran, worst
        ran += 1
        if ran % 1000 == 0:
            print(f"{ran} of {count} from seed {number}", file=sys.stderr, flush=True)
        try:
            check(example)
        except Exception as error:
            worst = (example, error)
            raise

    try:
        one()
    except Exception:
        if worst is None:
            raise
        example, error = worst
        raise Failed(f"{type(error).__name__}: {error}\n{example.command()}") from None
    return ran


def work(job: tuple[int, int, list[str]]) -> tuple[int, str]:
    """Run one process's share; return how many examples held, and the failure."""
    torch.set_num_threads(1)
    try:
        return fuzz(*job), ""
    except Failed as failure:
        return 0, str(failure)
