"""Layers by name: the library's, and those of a user's file."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from innerloop.lm import Config, parse
from innerloop.nn import RecipeLayer
from innerloop.recipe import Recipe

_FILE = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)")


@dataclass(frozen=True)
class Contender:
    """A stack of layers that can be made again and again."""

    name: str
    """As it was asked for."""
    make: Callable[[], Sequence[nn.Module]]
    """Draws the weights from torch's generator; each module maps ``[B, T, D]`` to the same, or to that and a state."""
    key: str
    """Changes when a user's file does; empty for the library's own."""


def contender(name: str, width: int, heads: int = 1, depth: int = 1) -> Contender:
    """Find a layer by its name.

    Args:
        name: A pattern of the library's layers, such as ``delta_rule`` or ``mamba2+attention``; or ``FILE.py:NAME``,
            where NAME is a module's class (called with the width, and with ``heads`` if it takes them), a function that
            returns a module, or a recipe.
        width: Of the model, D.
        heads: Of every layer that takes them.
        depth: How often the pattern, or the user's layer, is repeated.

    Returns:
        What makes it.

    Raises:
        ValueError: If there is no such layer, or it cannot be made, or it does not map ``[B, T, D]`` to that shape.

    Example:
        >>> from innerloop.probe import contender
        >>> [type(layer).__name__ for layer in contender("mamba2+attention", width=16, heads=2).make()]
        ['Mamba2', 'SoftmaxAttention']
    """
    found = _FILE.fullmatch(name)
    if found is None:
        if name.endswith(".py"):
            raise ValueError(f"a layer of one's own must be FILE.py:NAME; got {name}. Say which name of the file it is")
        made = partial(_ours, name, width, heads, depth)
        key = ""
    else:
        path = Path(found["path"])
        thing, key = _loaded(path, found["name"])
        made = partial(_theirs, name, thing, width, heads, depth)
    with torch.random.fork_rng(devices=[]):
        _check_shapes(name, made, width)
    return Contender(name, made, key)


def _ours(pattern: str, width: int, heads: int, depth: int) -> list[nn.Module]:
    once = parse(pattern)
    config = Config(vocab_size=1, width=width, heads=heads, pattern=pattern, depth=depth * len(once))
    entries = config.layers
    rules = [entry.rule for entry in entries]
    return [
        config.make_layer(entry, rules[:n].count(entry.rule), rules.count(entry.rule))
        for n, entry in enumerate(entries)
    ]


def _loaded(path: Path, name: str) -> tuple[Any, str]:
    """Run a user's file and return what it calls by this name, and a hash of the file."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} must be a Python file; {error.strerror}") from None
    key = hashlib.sha256(source).hexdigest()[:16]
    label = f"_innerloop_probe_{key}"
    if label not in sys.modules:
        spec = importlib.util.spec_from_file_location(label, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[label] = module  # dataclasses look their module up
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # a user's file may raise anything
            del sys.modules[label]
            where = getattr(error, "lineno", None) or _line(error, path)
            raise ValueError(f"{path} must run; line {where} raises {_said(error)}") from error
    found = getattr(sys.modules[label], name, None)
    if found is None:
        raise ValueError(f"{path} must define {name}; it does not")
    return found, key


def _line(error: BaseException, path: Path) -> int | str:
    trace, line = error.__traceback__, "?"
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _theirs(name: str, thing: object, width: int, heads: int, depth: int) -> list[nn.Module]:
    made: list[nn.Module] = []
    for _ in range(depth):
        try:
            layer = _layer(thing, width, heads)
        except Exception as error:  # as above
            raise ValueError(f"{name} must make a layer of width={width}; it raises {_said(error)}") from error
        if not isinstance(layer, nn.Module):
            raise ValueError(f"{name} must be a module's class, a function that returns a module, or a recipe; "
                             f"got {type(layer).__name__}")  # fmt: skip
        made.append(layer)
    return made


def _layer(thing: object, width: int, heads: int) -> object:
    if callable(thing) and not isinstance(thing, Recipe | nn.Module):
        takes = inspect.signature(thing).parameters
        if takes:
            thing = thing(width, heads=heads) if "heads" in takes else thing(width)
        else:
            thing = thing()
    return RecipeLayer(width, thing, heads) if isinstance(thing, Recipe) else thing


def _check_shapes(name: str, make: Callable[[], Sequence[nn.Module]], width: int) -> None:
    layers = make()  # a pattern that does not parse says so now
    x = torch.randn(2, 3, width)
    for layer in layers:
        try:
            y = output(layer(x))
        except Exception as error:  # as above
            raise ValueError(f"{name} must map [B, T, D] to the same shape; it raises {_said(error)}") from error
        if y.shape != x.shape:
            raise ValueError(f"{name} must map [B, T, D] = {list(x.shape)} to the same shape; got {list(y.shape)}")


def output(returned: object) -> Tensor:
    """Return the output of a layer that may return its state beside it; TypeError if there is none."""
    y = returned[0] if isinstance(returned, tuple) and returned else returned
    if not isinstance(y, Tensor):
        raise TypeError(f"it returns {type(returned).__name__}")
    return y


def _said(error: BaseException) -> str:
    words = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
