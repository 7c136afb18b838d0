"""Layers as their authors published them: ``[B, T, D]`` and a state in, ``[B, T, D]`` and a state out."""

from innerloop.nn.gated_delta_net import GatedDeltaNet
from innerloop.nn.gates import parameter_groups
from innerloop.nn.layer import Layer
from innerloop.nn.state import LayerState

__all__ = [
    "GatedDeltaNet",
    "Layer",
    "LayerState",
    "parameter_groups",
]
