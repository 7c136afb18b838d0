"""A model's layers over one sequence: every call of an op inside is kept, and traced."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from innerloop.inspect.network import KINDS as NETWORKS
from innerloop.inspect.network import trace_network
from innerloop.inspect.trace import Trace, trace
from innerloop.nn import Layer
from innerloop.nn.layer import Given


class Call(NamedTuple):
    """One call of an op by a layer."""

    layer: str
    """The layer's name in the model, and that of the part whose memory it is, if it has several."""
    rule: str
    tokens: tuple[Tensor, ...]
    """As the op takes them."""
    options: dict[str, Any]


@contextmanager
def recording(model: nn.Module) -> Generator[list[Call], None, None]:
    """Keep every call of an op that layers of a model make inside the block.

    Args:
        model: Which may hold layers of ``innerloop.nn`` anywhere.

    Yields:
        The calls, in their order.
    """
    calls: list[Call] = []

    def keep(name: str) -> Callable[[Given], None]:
        def note(call: Given) -> None:
            layer = ".".join(filter(None, (name, call.part)))
            calls.append(Call(layer, call.function.__name__, call.tokens, call.options))

        return note

    with ExitStack() as stack:
        for name, layer in model.named_modules():
            if isinstance(layer, Layer):
                stack.enter_context(layer.observed(keep(name)))
        yield calls


@torch.no_grad()
def inspect_model(model: nn.Module, inputs: Tensor, tokens: Sequence[str] | None = None) -> dict[str, Trace]:
    """Run a model over one sequence and trace every layer.

    Args:
        model: Which takes ``inputs``, such as an ``innerloop.lm.LanguageModel``.
        inputs: One row, ``[1, T]`` or ``[1, T, ...]``.
        tokens: What to call the tokens; their numbers if None.

    Returns:
        Traces by the layers' names in the model, in their order; of memories that are networks see
        :func:`innerloop.inspect.trace_network`. A layer's second memory has its part behind the name.

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
    found = {call.layer: _traced(call, tokens) for call in calls}
    if not found:
        raise ValueError("the model must have a layer of innerloop.nn; got none that has run")
    return found


def inspect_layer(layer: Layer, x: Tensor, tokens: Sequence[str] | None = None) -> Trace:
    """Run one layer over one sequence ``[1, T, D]`` and trace its memory; errors are those of ``inspect_model``."""
    return next(iter(inspect_model(layer, x, tokens).values()))


def _traced(call: Call, tokens: Sequence[str] | None) -> Trace:
    if call.rule in NETWORKS:
        return trace_network(call.rule, call.tokens, call.options, tokens)
    return trace(call.rule, *call.tokens, tokens=tokens, **call.options)
