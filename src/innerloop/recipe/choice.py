"""What the three families of choices share: a printed form, and fields that may change with every token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, replace
from typing import ClassVar, TypeVar

from torch import Tensor

Value = float | Tensor | None
"""A field that a gate may feed: a number, a tensor of one number a head ``[G]``, or None if only a gate can give it."""

ChoiceType = TypeVar("ChoiceType", bound="Choice")


class Choice:
    """One of the three choices that fix a layer: its weights, its class of memory, or its solver."""

    gates: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Fields that may change with every token, and the axes that such a gate may have after B and T."""

    @property
    def words(self) -> str:
        """The choice in a few words, for tables."""
        raise NotImplementedError

    def at(self: ChoiceType, given: dict[str, Tensor]) -> ChoiceType:
        """Return this choice as it stands at one token, the given fields replaced."""
        return replace(self, **given) if given else self  # pyright: ignore[reportArgumentType]

    def __repr__(self) -> str:
        """Return only what differs from the defaults, so that a recipe prints as one line."""
        shown = [field for field in fields(self) if _differs(field, getattr(self, field.name))]  # pyright: ignore
        return f"{type(self).__name__}({', '.join(f'{f.name}={_printed(getattr(self, f.name))}' for f in shown)})"


def _differs(field: Field[object], value: object) -> bool:
    if isinstance(value, Tensor) or field.default is MISSING:
        return True
    return bool(value != field.default)


def _printed(value: object) -> str:
    if isinstance(value, Tensor):
        return f"tensor{list(value.shape)}"
    return getattr(value, "__name__", None) or repr(value)


def check_number(owner: Choice, name: str, low: float, high: float = float("inf")) -> None:
    """Check a field that holds a number; what a gate feeds is the caller's to bound.

    Raises:
        ValueError: If it is out of range.
    """
    value = getattr(owner, name)
    if value is None or isinstance(value, Tensor):
        return
    if not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(
            f"{type(owner).__name__}.{name} must be a number in [{low:g}, {high:g}]; got {value!r}. "
            "Pass a gate to run() if it changes with every token."
        )


def check_count(owner: Choice, name: str) -> None:
    """Check a field that counts something.

    Raises:
        ValueError: If it is not a whole number of at least 1.
    """
    value = getattr(owner, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{type(owner).__name__}.{name} must be a whole number, 1 or more; got {value!r}. Use 1.")


def along(value: Value, like: Tensor) -> float | Tensor:
    """Return a number, ``[G]`` or ``[B, G]`` aligned with the leading axes of ``like`` ``[B, G, ...]``."""
    if isinstance(value, Tensor):
        return value.to(like.dtype).reshape(*value.shape, *[1] * (like.dim() - 2))
    assert value is not None, "Recipe checks that every field has a value before the loop starts"
    return value
