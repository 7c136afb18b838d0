"""The tasks by name."""

from __future__ import annotations

import dataclasses
from typing import Any

from innerloop.data.tasks.copying import SelectiveCopying
from innerloop.data.tasks.counting import ModularArithmetic, Parity
from innerloop.data.tasks.recall import AssociativeRecall, MultiQueryRecall, Needle, OverwriteRecall
from innerloop.data.tasks.regression import Capacity, DriftingRegression
from innerloop.data.tasks.task import Task
from innerloop.data.tasks.words import WordProblem

TASKS: dict[str, type[Task]] = {
    kind.name: kind
    for kind in (
        OverwriteRecall, AssociativeRecall, MultiQueryRecall, Needle, SelectiveCopying, Parity, ModularArithmetic,
        WordProblem, DriftingRegression, Capacity,
    )
}  # fmt: skip
"""Every task by its name."""


def task(name: str, **sizes: Any) -> Task:
    """Make a task by its name.

    Args:
        name: One of ``TASKS``.
        sizes: Its fields that are not to be as they stand, such as ``pairs=16``.

    Returns:
        The task.

    Raises:
        ValueError: If there is no such task, or it has no such field, or a size is out of range.

    Example:
        >>> from innerloop.data.tasks import task
        >>> task("mqar", pairs=4, tokens=32).shortcut
        0.25
    """
    if name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}; got {name!r}")
    known = [field.name for field in dataclasses.fields(TASKS[name])]
    for field in sizes:
        if field not in known:
            raise ValueError(f"{name} has the sizes {', '.join(known)}; got {field!r}")
    return TASKS[name](**sizes)
