"""A child whose experiments are made here: what they do is their name's."""

import os
import signal
import sys
import time
from pathlib import Path

from innerloop import experiments
from innerloop.experiments import child
from innerloop.experiments.experiment import Experiment


def threads(settings):
    """Multiply matrices that are large enough to be shared out, and count threads."""
    import torch

    x = torch.randn(400, 400, generator=torch.Generator().manual_seed(0))
    print("what experiments print is no news")
    return {"threads": torch.get_num_threads(), "sum": (x @ x).exp().sum().item()}


def clock(settings):
    """Say when it began and ended."""
    begin = time.monotonic()
    time.sleep(0.3)
    return {"begin": begin, "end": time.monotonic()}


def part(settings):
    """Keep one part, say so, and take a minute over the rest."""
    settings.part("first", lambda: {"pid": os.getpid()})
    settings.progress(0.5)
    time.sleep(60)
    return {}


RUNS = {
    "A1": clock, "A2": clock, "A3": clock, "A4": clock,
    "B1": threads, "B2": lambda settings: os._exit(3), "B3": lambda settings: os.kill(os.getpid(), signal.SIGKILL),
    "C1": lambda settings: {"value": 1.0}, "C2": part,
}  # fmt: skip
SECONDS = {"A2": 5.0, "C1": 2.0}


def load(name: str) -> Experiment:
    return Experiment(
        name=name, title="", claim="", source="", setting="", band="", run=RUNS[name], check=lambda result: None,
        tables=lambda result: [], figures=lambda result: [], seconds=SECONDS.get(name, 1.0), alone=name == "A4",
    )  # fmt: skip


def install() -> None:
    """Put these in the place of the package's own, here and in children."""
    from innerloop.experiments import processes

    names = os.environ.get("FAKES", " ".join(RUNS)).split()
    experiments.modules = lambda: dict.fromkeys(names, "")
    experiments.load = load
    processes.Child.module = "fake_child"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


if __name__ == "__main__":
    install()
    sys.exit(child.main())
