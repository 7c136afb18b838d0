"""The layers that a model may have, by the names of their rules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from innerloop import nn


@dataclass(frozen=True)
class Kind:
    """How a layer of one name is made."""

    make: Callable[..., nn.Layer]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """What the name stands for."""
    heads: bool = True
    """Whether it takes as many heads as the model says."""
    indexed: bool = False
    """Whether it is told its place among the layers of its kind, as RWKV-7 is."""

    @property
    def options(self) -> tuple[str, ...]:
        """What a configuration may choose."""
        names = list(inspect.signature(self.make).parameters)[1:]
        own = {*self.fixed, *(("index", "layers") if self.indexed else ())}
        return tuple(name for name in names if name not in own)


SHORT = {"attention": "softmax_attention"}
"""Other names."""

KINDS = {
    "softmax_attention": Kind(nn.SoftmaxAttention),
    "normalized_linear_attention": Kind(nn.LinearAttention),
    "retention": Kind(nn.RetNet),
    "gla": Kind(nn.GatedLinearAttention),
    "mamba2": Kind(nn.Mamba2),
    "delta_rule": Kind(nn.DeltaNet),
    "gated_delta_rule": Kind(nn.GatedDeltaNet),
    "kda": Kind(nn.KimiDeltaAttention),
    "gdn2": Kind(nn.GatedDeltaNet2),
    "rwkv7": Kind(nn.RWKV7, indexed=True),
    "delta_product": Kind(nn.GatedDeltaProduct),
    "longhorn": Kind(nn.Longhorn, {"diagonal": False}),
    "longhorn_diagonal": Kind(nn.Longhorn, {"diagonal": True, "heads": 1}, heads=False),
    "mesa": Kind(nn.MesaNet),
    "momentum_delta_rule": Kind(nn.TitansLinear),
    "ttt": Kind(nn.TTT),
    "titans": Kind(nn.Titans),
    "hope": Kind(nn.Hope),
    "cms": Kind(nn.CMS, heads=False),
}
"""Every layer of ``innerloop.nn`` by the name of its rule."""
