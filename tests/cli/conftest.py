"""Small experiments that count how often they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from innerloop import experiments
from innerloop.experiments import child, processes
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table


class Counted:
    """Makes experiments and remembers the names of those that ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def __call__(
        self,
        name: str = "A1",
        *,
        result: Result | None = None,
        run: Callable[[Settings], Result] | None = None,
        check: Callable[[Result], None] = lambda result: None,
        quick_seconds: float | None = None,
    ) -> Experiment:
        def counted(settings: Settings) -> Result:
            self.ran.append(name)
            settings.progress(0.5)
            return run(settings) if run else (result or {"value": 1.0})

        return Experiment(
            name=name,
            title=f"Title of {name}",
            claim="One is one.",
            source="Somewhere",
            setting="Nothing is drawn.",
            band="Always.",
            run=counted,
            check=check,
            tables=lambda result: [Table("Numbers", ("document", "ours"), [(1, result["value"])])],
            figures=lambda result: [Figure("A line", "It is straight.", lambda axes: axes.plot([0, 1], [0, 1]))],
            seconds=1.0,
            quick_seconds=quick_seconds,
        )


@pytest.fixture
def make() -> Counted:
    return Counted()


class Inline:
    """In a child's place: runs the experiment here, for what tests put together cannot be imported elsewhere."""

    def __init__(self, order: processes.Order, tell: processes.Tell) -> None:
        child.work(order, tell)
        tell(0)

    def stop(self) -> None:
        """Nothing to end."""


@pytest.fixture
def install(monkeypatch):
    """Put experiments in the place of the package's own, and run them in this process."""
    monkeypatch.setattr(processes, "Child", Inline)

    def replace_all(*chosen: Experiment) -> None:
        by_name = {experiment.name: experiment for experiment in chosen}
        monkeypatch.setattr(experiments, "modules", lambda: dict.fromkeys(by_name, "somewhere"))
        monkeypatch.setattr(experiments, "load", lambda name: replace(by_name[name]))

    return replace_all
