"""What layers may be told: checks of the options of several of them. Each raises ValueError with one line."""

from __future__ import annotations

import math


def check_whole(name: str, value: object) -> None:
    """Refuse what is no whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number above 0; got {value!r}")


def check_positive(name: str, value: float) -> None:
    """Refuse what is no finite number above 0."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be above 0 and finite; got {value}")


def check_one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    """Refuse what is not among the known words."""
    if value not in known:
        raise ValueError(f"{name} must be {' or '.join(map(repr, known))}; got {value!r}")


def check_truths(**options: object) -> None:
    """Refuse what is neither True nor False."""
    for name, value in options.items():
        if value is not True and value is not False:
            raise ValueError(f"{name} must be True or False; got {value!r}")
