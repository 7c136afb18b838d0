"""The published rules, one file each; this list is where the rest of the library learns of them."""

from innerloop import network
from innerloop.rule import register
from innerloop.rules import (
    cms,
    delta_product,
    delta_rule,
    gated_delta_rule,
    gdn2,
    gla,
    hope,
    kda,
    linear_attention,
    longhorn,
    longhorn_diagonal,
    mamba2,
    mesa,
    momentum_delta_rule,
    normalized_linear_attention,
    recursive_least_squares,
    retention,
    rwkv7,
    softmax_attention,
    titans,
    ttt,
)

ALL = (
    softmax_attention,
    linear_attention,
    normalized_linear_attention,
    retention,
    mamba2,
    delta_rule,
    gated_delta_rule,
    longhorn,
    momentum_delta_rule,
    recursive_least_squares,
    gla,
    kda,
    gdn2,
    rwkv7,
    delta_product,
    longhorn_diagonal,
    mesa,
)

for _module in ALL:
    register(_module.RULE)

NETWORKS = (ttt, titans, hope, cms)
"""Those whose memory is a network: their states hold as many weights as the caller's network has."""

for _module in NETWORKS:
    network.register(_module.RULE)
