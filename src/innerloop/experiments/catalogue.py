"""Finds the experiments without importing them.

A module named ``a01_bandwidth`` holds the experiment A1 as its ``EXPERIMENT``; the order is that of the file names.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from innerloop.experiments.experiment import Experiment

CLAIMS = tuple(f"{letter}{n}" for letter, count in (("A", 12), ("B", 13), ("C", 6)) for n in range(1, count + 1))
"""The documents' claims, each of which is to have an experiment of its name."""

_PACKAGE = "innerloop.experiments"
_MODULE = re.compile(r"([a-z])(\d\d)_\w+")


def modules() -> dict[str, str]:
    """Every experiment's name and the module that holds it, in order.

    Returns:
        A dict such as ``{"A1": "a01_bandwidth", ...}``. Nothing is imported.
    """
    matches = (_MODULE.fullmatch(info.name) for info in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return {f"{found[1].upper()}{int(found[2])}": found[0] for found in matches if found}


def load(name: str) -> Experiment:
    """Import one experiment.

    Args:
        name: A key of :func:`modules`, such as ``A1``.

    Returns:
        The module's ``EXPERIMENT``.

    Raises:
        ValueError: If there is no experiment of this name.
    """
    known = modules()
    if name not in known:
        raise ValueError(f"name must be an experiment, one of {' '.join(known)}; got {name!r}")
    return importlib.import_module(f"{_PACKAGE}.{known[name]}").EXPERIMENT
