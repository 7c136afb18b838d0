"""What every memory rule must satisfy, for ours and for yours: ``innerloop.testing.check_rule(rule)``.

Truth is the float64 token loop over ``step``, and for ``step`` itself the executed recipe. The error of a tensor a
against truth b is ``max|a - b| / max|b|``, held to one table of bars.
"""

from innerloop.testing.compare import TOLERANCES, assert_close, error, forms, gradients, outcome, truth
from innerloop.testing.contract import CONTRACT, check_rule
from innerloop.testing.draw import Call, draw_call
from innerloop.testing.network_contract import NETWORK_CONTRACT, check_network_rule
from innerloop.testing.network_draw import NetworkCall, draw_network_call

__all__ = [
    "CONTRACT",
    "NETWORK_CONTRACT",
    "TOLERANCES",
    "Call",
    "NetworkCall",
    "assert_close",
    "check_network_rule",
    "check_rule",
    "draw_call",
    "draw_network_call",
    "error",
    "forms",
    "gradients",
    "outcome",
    "truth",
]
