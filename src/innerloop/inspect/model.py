"""A model's layers over one sequence: every call of an op inside is kept, and traced."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from innerloop.inspect.reading import KINDS
from innerloop.inspect.trace import Trace, trace
from innerloop.nn import Layer
from innerloop.nn.layer import Turn
from innerloop.rule import get

_LOCK = threading.Lock()


class Call(NamedTuple):
    """One call of an op by a layer."""

    layer: str
    """The layer's name in the model."""
    rule: str
    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]


class Calls(list[Call]):
    """Calls in their order, and the layers whose memory is a network, which are not looked into."""

    def __init__(self) -> None:
        """Begin without any."""
        super().__init__()
        self.skipped: list[str] = []


@contextmanager
def recording(model: nn.Module) -> Generator[Calls, None, None]:
    """Keep every call of an op that layers of a model make inside the block; one block at a time in a process.

    Args:
        model: Which may hold layers of ``innerloop.nn`` anywhere.

    Yields:
        The calls, in their order.
    """
    calls, now = Calls(), [""]
    read, learn = Turn.read, Turn.learn

    def read_and_keep(turn: Turn, function: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:  # ruff: ignore[any-type] - an op
        calls.append(Call(now[0], function.__name__, q.to(v.dtype), k.to(v.dtype), v, options))
        return read(turn, function, q, k, v, **options)

    def learn_and_note(turn: Turn, function: Any, *tokens: Tensor, **options: Any) -> Tensor:  # ruff: ignore[any-type] - an op
        if now[0] not in calls.skipped:
            calls.skipped.append(now[0])
        return learn(turn, function, *tokens, **options)

    def enter(name: str) -> Any:  # ruff: ignore[any-type] - a hook
        return lambda module, inputs: now.__setitem__(0, name)

    with _LOCK:
        hooks = [m.register_forward_pre_hook(enter(n)) for n, m in model.named_modules() if isinstance(m, Layer)]
        Turn.read, Turn.learn = read_and_keep, learn_and_note  # type: ignore[method-assign]
        try:
            yield calls
        finally:
            Turn.read, Turn.learn = read, learn  # type: ignore[method-assign]
            for hook in hooks:
                hook.remove()


@torch.no_grad()
def inspect_model(model: nn.Module, inputs: Tensor, tokens: Sequence[str] | None = None) -> dict[str, Trace]:
    """Run a model over one sequence and trace every layer.

    Args:
        model: Which takes ``inputs``, such as an ``innerloop.lm.LanguageModel``.
        inputs: One row, ``[1, T]`` or ``[1, T, ...]``.
        tokens: What to call the tokens; their numbers if None.

    Returns:
        Traces by the layers' names in the model, in their order. Layers whose memory is a network are left out.

    Raises:
        ValueError: If there is more than one row, or no layer that can be looked into.

    Example:
        >>> import torch
        >>> from innerloop.inspect import inspect_model
        >>> from innerloop.lm import Config, LanguageModel
        >>> model = LanguageModel(Config(vocab_size=17, width=16, heads=2, pattern="kda+attention"))
        >>> {name: found.rule for name, found in inspect_model(model, torch.tensor([[1, 2, 3]])).items()}
        {'blocks.0.layer': 'kda', 'blocks.1.layer': 'softmax_attention'}
    """
    if inputs.shape[0] != 1:
        raise ValueError(f"inputs must have one row; got {inputs.shape[0]}. Look at one sequence at a time")
    mode = model.training
    model.eval()
    try:
        with recording(model) as calls:
            model(inputs)
    finally:
        model.train(mode)
    found = {call.layer: _traced(call, tokens) for call in calls if tuple(get(call.rule).states) in KINDS}
    if not found:
        network = f"; {', '.join(calls.skipped)} keep networks, which are not" if calls.skipped else ""
        raise ValueError(f"the model must have a layer of innerloop.nn whose memory can be looked into{network}")
    return found


def inspect_layer(layer: Layer, x: Tensor, tokens: Sequence[str] | None = None) -> Trace:
    """Run one layer over one sequence ``[1, T, D]`` and trace it; arguments and errors as of ``inspect_model``."""
    (found,) = inspect_model(layer, x, tokens).values()
    return found


def _traced(call: Call, tokens: Sequence[str] | None) -> Trace:
    return trace(call.rule, call.q, call.k, call.v, tokens=tokens, **call.options)
