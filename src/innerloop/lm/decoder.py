"""A model's next token without Python between its layers: one native call in memory that stays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from innerloop.kernels.native.series import MOST, Series, present
from innerloop.kernels.operator import is_plain
from innerloop.lm.block import Block, FeedForward
from innerloop.lm.state import State
from innerloop.nn import GatedDeltaNet, LayerState
from innerloop.nn.convolution import ShortConvolution
from innerloop.nn.dropout import Dropout
from innerloop.nn.gates import Decay, GateProjection
from innerloop.nn.norms import RMSNorm
from innerloop.nn.projections import Projection
from innerloop.nn.streams import Streams
from innerloop.nn.written import Written, served

if TYPE_CHECKING:
    from innerloop.lm.model import LanguageModel

_PARTS = (
    Block, FeedForward, GatedDeltaNet, Streams, ShortConvolution, GateProjection, Decay, RMSNorm, Projection,
    Dropout, nn.ModuleList, nn.ModuleDict,
)  # fmt: skip
"""What is written down as it is: a subclass may do something else."""


class Decoder:
    """A model behind a state of its own, from token to token.

    It is good as long as ``fits`` says so: the weights are the same memory and have not changed since.
    """

    def __init__(self, model: LanguageModel, state: State) -> None:
        """Write the model down, behind a copy of the state."""
        self._seen, self._state = 0, state.clone()
        parts = list(model.modules())
        self._watched = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self._places = [(place, name, x) for part in parts for place in (part._parameters, part._modules)
                        for name, x in place.items()]  # fmt: skip
        self._parameters = [x for _, _, x in self._places if isinstance(x, nn.Parameter)]
        self._structure = self._now()
        self._embedding = model.embedding.weight
        series = self._series = Series(state.position.shape[0])
        self._stream = series.room(model.config.width)
        for block, layer in zip(model.blocks, self._state.layers, strict=True):
            assert isinstance(block, Block)
            _write(series, block, layer, self._stream)
        x = series.norm(self._stream, model.norm.weight, model.norm.eps)
        (self._logits,) = series.linear(x, [model.head_weight])

    def fits(self) -> bool:
        """Return whether the model is still the one that was written down."""
        return (
            self._now() == self._structure
            and all(place.get(name) is x for place, name, x in self._places)
            and not any(self._watched)
            and not nn.modules.module._has_any_global_hook()
        )

    def _now(self) -> list[Any]:
        return [torch.get_num_threads(), *[(p.data_ptr(), p._version) for p in self._parameters]]

    def __call__(self, token: Tensor) -> Tensor:
        """Return the logits after a token of every row, ``[N, vocab_size]``; the next call overwrites them."""
        torch.index_select(self._embedding, 0, token, out=self._stream)
        self._series.run()
        self._seen += 1
        return self._logits

    @property
    def state(self) -> State:
        """What the model would carry now; the next call overwrites it."""
        for layer in self._state.layers:
            layer.position += self._seen
        self._seen = 0
        return self._state


def decoder(model: LanguageModel, state: State) -> Decoder | None:
    """Return what decodes the next tokens of a model behind a state, or None where it has to be run as it is."""
    if not present() or state.position.shape[0] > MOST or not is_plain(()) or torch.is_autocast_enabled("cpu"):
        return None
    if not all(isinstance(block, Block) and _written(block) for block in model.blocks) or _hooked(model):
        return None
    tensors = [*model.parameters(), *(x for layer in state.layers for x in layer.named().values() if x.ndim > 1)]
    plain = all(x.dtype is torch.float32 and x.is_cpu and x.is_contiguous() and not x.is_neg() for x in tensors)
    return Decoder(model, state) if plain and not any(p.is_inference() for p in model.parameters()) else None


def _written(block: Block) -> bool:
    return isinstance(block.layer, Written) and served(block.layer.rule)


def _hooked(model: LanguageModel) -> bool:
    """Whether a part is not ours, or somebody watches one."""
    if nn.modules.module._has_any_global_hook():
        return True
    parts = list(model.modules())[1:]
    ours = (*_PARTS, type(model.embedding))
    return type(model.embedding).__module__ != "innerloop.lm.model" or any(
        type(part) not in ours or part._forward_hooks or part._forward_pre_hooks for part in parts
    )


def _write(series: Series, block: Block, state: LayerState, stream: Tensor) -> None:
    x = series.norm(stream, block.layer_norm.weight, block.layer_norm.eps)
    assert isinstance(block.layer, Written)
    block.layer.write(series, x, state, stream)
    forward, norm = block.feed_forward, block.feed_forward_norm
    if forward is None or norm is None:
        return
    x = series.norm(stream, norm.weight, norm.eps)
    gate, up = series.linear(x, [forward.gate.weight, forward.up.weight])
    series.linear(series.silu(gate, up), [forward.down.weight], add_to=stream)
