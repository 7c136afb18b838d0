"""Sequence layers that learn while they run: a memory m, one step of regression a token, a read o = m(q)."""

from importlib import import_module
from typing import TYPE_CHECKING

from innerloop._version import __version__

if TYPE_CHECKING:
    from innerloop import inspect, lm, nn, ops, probe, recipe, states, testing
    from innerloop.kernels.operator import Options
    from innerloop.ops import explain
    from innerloop.rule import Constant, Gate, Rule, register

_HOME = {
    "inspect": "",
    "lm": "",
    "nn": "",
    "ops": "",
    "probe": "",
    "recipe": "",
    "states": "",
    "testing": "",
    "explain": "ops",
    "Constant": "rule",
    "Gate": "rule",
    "Options": "kernels.operator",
    "Rule": "rule",
    "register": "rule",
}

__all__ = [
    "Constant",
    "Gate",
    "Options",
    "Rule",
    "__version__",
    "explain",
    "inspect",
    "lm",
    "nn",
    "ops",
    "probe",
    "recipe",
    "register",
    "states",
    "testing",
]


def __getattr__(name: str) -> object:
    # Lazy: the command line answers --help without waiting for torch.
    if name not in _HOME:
        raise AttributeError(f"module 'innerloop' has no attribute {name!r}")
    home = _HOME[name]
    value = getattr(import_module(f"innerloop.{home}"), name) if home else import_module(f"innerloop.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
