"""What a call may say beside its tensors: counts, numbers, truths and words, checked alike for layers and ops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real


class WrongTypeError(TypeError, ValueError):
    """An argument of another type than it must have, which is a bad value too: either way of catching it is right."""


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raise unless ``value`` is a whole number of at least ``least``."""
    wanted = "a whole number above 0" if least == 1 else f"a whole number of at least {least}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise WrongTypeError(f"{name} must be {wanted}; got {value!r:.40}")
    if value < least:
        raise ValueError(f"{name} must be {wanted}; got {value}")


def check_positive(name: str, value: object) -> None:
    """Raise unless ``value`` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise WrongTypeError(f"{name} must be a finite number above 0; got {value!r:.40}")
    if not 0 < float(value) < math.inf:
        raise ValueError(f"{name} must be a finite number above 0; got {value}")


def check_flags(**flags: object) -> None:
    """Raise unless each is True or False."""
    for name, value in flags.items():
        if value is not True and value is not False:
            raise WrongTypeError(f"{name} must be True or False; got {value!r:.40}")


def check_choice(name: str, value: object, known: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of the names."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}; got {value!r:.40}")
