"""Layers as their authors published them: ``[B, T, D]`` and a state in, ``[B, T, D]`` and a state out."""

from innerloop.nn.cms import CMS
from innerloop.nn.delta_net import DeltaNet
from innerloop.nn.gated_delta_net import GatedDeltaNet
from innerloop.nn.gated_delta_net2 import GatedDeltaNet2
from innerloop.nn.gated_delta_product import GatedDeltaProduct
from innerloop.nn.gated_linear_attention import GatedLinearAttention
from innerloop.nn.gates import parameter_groups
from innerloop.nn.hope import Hope
from innerloop.nn.kimi_delta_attention import KimiDeltaAttention
from innerloop.nn.layer import Layer
from innerloop.nn.linear_attention import LinearAttention
from innerloop.nn.longhorn import Longhorn
from innerloop.nn.mamba2 import Mamba2
from innerloop.nn.mesa_net import MesaNet
from innerloop.nn.recipe_layer import RecipeLayer
from innerloop.nn.ret_net import RetNet
from innerloop.nn.rwkv7 import RWKV7
from innerloop.nn.softmax_attention import SoftmaxAttention
from innerloop.nn.state import LayerState
from innerloop.nn.titans import Titans
from innerloop.nn.titans_linear import TitansLinear
from innerloop.nn.ttt import TTT

__all__ = [
    "CMS",
    "RWKV7",
    "TTT",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "GatedLinearAttention",
    "Hope",
    "KimiDeltaAttention",
    "Layer",
    "LayerState",
    "LinearAttention",
    "Longhorn",
    "Mamba2",
    "MesaNet",
    "RecipeLayer",
    "RetNet",
    "SoftmaxAttention",
    "Titans",
    "TitansLinear",
    "parameter_groups",
]
