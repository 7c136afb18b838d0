"""The axes of a call as arguments: ``--B 2 --T 4096``."""

from __future__ import annotations

import argparse

from innerloop.cli.errors import InputError

HEADS = "softmax_attention has H key and G query heads"
_AXES = {
    "B": "rows",
    "T": "tokens",
    "H": "key heads",
    "G": "value heads, a multiple of H; H if left out",
    "K": "key width",
    "V": "value width; K if left out",
    "n": "steps a token, for rules that take several",
}


def add_sizes(parser: argparse.ArgumentParser, axes: str, **defaults: int) -> None:
    """Declare an argument for each axis.

    Args:
        parser: Of the command.
        axes: Letters with spaces between.
        **defaults: By letter; others are None.
    """
    group = parser.add_argument_group("shape", HEADS)
    for axis in axes.split():
        default = defaults.get(axis)
        words = _AXES[axis] + ("" if default is None else f"; {default}")
        group.add_argument(f"--{axis}", type=int, default=default, metavar="N", help=words)


def checked_sizes(arguments: argparse.Namespace, axes: str) -> dict[str, int]:
    """Return the size of every axis, those left out filled in.

    Raises:
        InputError: If one is out of range, or G is no multiple of H.
    """
    sizes = {axis: getattr(arguments, axis) for axis in axes.split()}
    for axis, default in (("G", "H"), ("V", "K")):
        if sizes[axis] is None:
            sizes[axis] = sizes[default]
    for axis, size in sizes.items():
        low = 0 if axis in ("B", "T") else 1
        if size is not None and size < low:
            raise InputError(f"--{axis} must be at least {low}; got {size}")
        if size is not None and size > 2**40:
            raise InputError(f"--{axis} must be at most 2^40; got {size}")
    if sizes["G"] % sizes["H"]:
        raise InputError(f"--G must be a multiple of --H; got {sizes['G']} and {sizes['H']}")
    return sizes
