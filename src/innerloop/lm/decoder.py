"""A model's next token with little or no Python between its layers: native calls in memory that stays."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from innerloop.kernels.alike import is_plain
from innerloop.kernels.native.series import MOST, Series, present
from innerloop.lm.block import Block, FeedForward
from innerloop.lm.state import State
from innerloop.nn import RWKV7, DeltaNet, GatedDeltaNet, Layer, LayerState
from innerloop.nn.convolution import ShortConvolution
from innerloop.nn.dropout import Dropout
from innerloop.nn.gates import Decay, GateProjection
from innerloop.nn.norms import RMSNorm
from innerloop.nn.projections import Projection
from innerloop.nn.streams import Streams
from innerloop.nn.written import Written, served

if TYPE_CHECKING:
    from innerloop.lm.model import LanguageModel

_LAYERS = (DeltaNet, GatedDeltaNet)
"""What is written down whole; other layers are called as they are, between what is around them."""
_PARTS = (
    *_LAYERS, Block, FeedForward, Streams, ShortConvolution, GateProjection, Decay, RMSNorm, Projection, Dropout,
    nn.ModuleList, nn.ModuleDict,
)  # fmt: skip
"""What is written down as it is: a subclass may do something else."""


class Decoder:
    """A model behind a state of its own, from token to token.

    It is good as long as ``fits`` says so: the weights are the same memory and have not changed since.
    """

    def __init__(self, model: LanguageModel, state: State) -> None:
        """Write the model down, behind a copy of what it will overwrite."""
        self._model, self._seen = model, 0
        self._layers: list[LayerState] = []
        parts = [model, *_parts(model)]
        self._watched = [hooks for part in parts[1:] for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self._places = [(place, name, x) for part in parts for place in (part._parameters, part._modules)
                        for name, x in place.items()]  # fmt: skip
        self._weights = [x for _, _, x in self._places if isinstance(x, nn.Parameter)]
        self._before = self._now()
        series = self._series = Series(state.position.shape[0])
        self._stream = series.room(model.config.width)
        for block, layer in zip(_blocks(model), state.layers, strict=True):
            self._write(block, layer)
        x = series.norm(self._stream, model.norm.weight, model.norm.eps)
        (self._logits,) = series.linear(x, [model.head_weight])

    def fits(self) -> bool:
        """Return whether the model is still the one that was written down."""
        return (
            self._now() == self._before
            and all(place.get(name) is x for place, name, x in self._places)
            and not any(self._watched)
            and not nn.modules.module._has_any_global_hook()
        )

    def __call__(self, token: Tensor) -> Tensor:
        """Return the logits after a token of every row, ``[N, vocab_size]``; the next call overwrites them."""
        torch.index_select(self._model.embedding.weight, 0, token, out=self._stream)
        self._series.run()
        self._seen += 1
        return self._logits

    @property
    def state(self) -> State:
        """What the model would carry now; the next call overwrites it."""
        for layer, block in zip(self._layers, _blocks(self._model), strict=True):
            if _whole(block.layer):
                layer.position += self._seen
        self._seen = 0
        return State(tuple(self._layers))

    def _now(self) -> list[Any]:
        settings = (torch.get_num_threads(), self._model.training)
        return [settings, *[(p.data_ptr(), p._version) for p in self._weights]]

    def _write(self, block: Block, state: LayerState) -> None:
        series, stream, layer = self._series, self._stream, block.layer
        x = series.norm(stream, block.layer_norm.weight, block.layer_norm.eps)
        self._layers.append(state)
        if _whole(layer) and isinstance(layer, Written):
            self._layers[-1] = state.clone()
            layer.write(series, x, self._layers[-1], stream)
        else:
            series.call(partial(self._through, len(self._layers) - 1, layer, x))
        forward, norm = block.feed_forward, block.feed_forward_norm
        if forward is None or norm is None:
            return
        x = series.norm(stream, norm.weight, norm.eps)
        gate, up = series.linear(x, [forward.gate.weight, forward.up.weight])
        series.linear(series.silu(gate, up), [forward.down.weight], add_to=stream)

    def _through(self, place: int, layer: Layer, x: Tensor) -> None:
        y, self._layers[place] = layer(x[:, None], self._layers[place])
        self._stream += y[:, 0]


def decoder(model: LanguageModel, state: State) -> Decoder | None:
    """Return what decodes the next tokens of a model behind a state, or None where it has to be run as it is."""
    if not present() or state.position.shape[0] > MOST or not is_plain(()) or torch.is_autocast_enabled("cpu"):
        return None
    blocks = list(model.blocks)
    if any(type(block) is not Block or isinstance(block.layer, RWKV7) for block in blocks) or _foreign(model):
        return None
    whole = [_whole(block.layer) for block in _blocks(model)]
    if model.training and not all(whole):
        return None
    weights = [p for part in _parts(model) for p in part._parameters.values() if p is not None]
    states = [layer for layer, mine in zip(state.layers, whole, strict=True) if mine]
    tensors = [*weights, *(x for layer in states for x in layer.named().values() if x.ndim > 1)]
    plain = all(x.dtype is torch.float32 and x.is_cpu and x.is_contiguous() and not x.is_neg() for x in tensors)
    # Weights made in inference mode do not tell when they change.
    return Decoder(model, state) if plain and not any(p.is_inference() for p in weights) else None


def _blocks(model: LanguageModel) -> Iterator[Block]:
    for block in model.blocks:
        assert isinstance(block, Block)
        yield block


def _whole(layer: Layer) -> bool:
    return type(layer) in _LAYERS and served(layer.rule)


def _parts(model: LanguageModel) -> list[nn.Module]:
    """Return the modules that are written down, without those of layers that are called."""
    called = {id(part) for block in _blocks(model) if not _whole(block.layer) for part in block.layer.modules()}
    return [part for part in list(model.modules())[1:] if id(part) not in called]


def _foreign(model: LanguageModel) -> bool:
    """Whether a part is not ours, or somebody watches one."""
    if nn.modules.module._has_any_global_hook() or type(model.embedding).__module__ != "innerloop.lm.model":
        return True
    ours = (*_PARTS, type(model.embedding))
    return any(type(x) not in ours or x._forward_hooks or x._forward_pre_hooks for x in _parts(model))
