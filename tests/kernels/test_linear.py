"""The work of a backward pass grows with the sequence, not with its square."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from innerloop import rules
from innerloop.kernels import families
from innerloop.testing import draw_call

LOOPS = [module.RULE.loop for module in rules.ALL if not module.RULE.grows]  # attention looks at the whole past
CHANNELED = [families.CHANNEL_ADDITIVE, families.CHANNEL_DELTA, families.DECOUPLED_DELTA, families.GENERALIZED_DELTA]
CHUNKED = [families.ADDITIVE, families.DELTA, families.PROXIMAL_DELTA, families.MOMENTUM, families.RIDGE,
           families.DIAGONAL, families.MESA, *CHANNELED]  # fmt: skip
RULE_OF = {"additive": "mamba2", "delta": "gated_delta_rule", "proximal_delta": "longhorn",
           "momentum": "momentum_delta_rule", "ridge": "recursive_least_squares", "channel_additive": "gla",
           "channel_delta": "kda", "decoupled_delta": "gdn2", "generalized_delta": "rwkv7",
           "diagonal": "longhorn_diagonal", "mesa": "mesa"}  # fmt: skip


class Written(TorchDispatchMode):
    """Counts the numbers that all operations write."""

    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        fresh = not any(a.alias_info for a in function._schema.returns)  # a view writes nothing
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if fresh and isinstance(x, torch.Tensor):
                self.total += x.numel()
        return result


def written(operator, rule, length, packing=None):
    call = draw_call(rule, B=1, T=length, H=1, G=1, K=8, V=8)
    gates = call.rule.complete(call.gates, call.v).values()
    states = [None] * len(call.rule.states)
    constants = [constant.default for constant in call.rule.constants]
    needs = [True] * (3 + len(gates)) + [False] * len(states)
    grads = [call.v.new_ones((*call.q.shape[:2], *call.v.shape[-2:]))] + [None] * len(states)
    with Written() as mode:
        inputs, options = (call.q, call.k, call.v, *gates, *states), (packing, 1.0, False, 16, constants, 0, False)
        operator._gradients(*inputs, *options, *grads, needs)
    return mode.total


@pytest.mark.parametrize("operator", [*LOOPS, *CHUNKED], ids=lambda operator: operator.name)
def test_gradients_write_a_linear_amount(operator):
    rule = RULE_OF.get(operator.name, operator.name.removesuffix("_loop"))
    lengths = (64, 256) if operator in CHUNKED else (16, 64)  # a loop has no chunks to fill
    short, long = (written(operator, rule, length) for length in lengths)
    assert long < 4.2 * short


@pytest.mark.parametrize("operator", CHUNKED, ids=lambda operator: operator.name)
def test_packed_gradients_write_a_linear_amount(operator):
    rule = RULE_OF[operator.name]
    amounts = [written(operator, rule, length, torch.arange(0, length + 1, 32)) for length in (64, 256)]
    assert amounts[1] < 4.2 * amounts[0]
