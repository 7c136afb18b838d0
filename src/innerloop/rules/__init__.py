"""The published rules, one file each; this list is where the rest of the library learns of them."""

from innerloop.rule import register
from innerloop.rules import (
    delta_product,
    delta_rule,
    gated_delta_rule,
    linear_attention,
    longhorn,
    longhorn_diagonal,
    mamba2,
    mesa,
    momentum_delta_rule,
    normalized_linear_attention,
    recursive_least_squares,
    retention,
    softmax_attention,
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
    delta_product,
    longhorn_diagonal,
    mesa,
)

for _module in ALL:
    register(_module.RULE)
