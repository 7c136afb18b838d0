"""Small experiments that count how often they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from innerloop import experiments
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


@pytest.fixture
def install(monkeypatch):
    """Put experiments in the place of the package's own."""

    def replace_all(*chosen: Experiment) -> None:
        by_name = {experiment.name: experiment for experiment in chosen}
        monkeypatch.setattr(experiments, "modules", lambda: dict.fromkeys(by_name, "somewhere"))
        monkeypatch.setattr(experiments, "load", lambda name: replace(by_name[name]))

    return replace_all
