"""One token at a time: the same options, the same state, nothing but what was given."""

import pytest
import torch

from innerloop import ops, rules
from innerloop.testing import assert_close, draw_call, forms, outcome

NAMES = [module.RULE.name for module in rules.ALL]


def stepped(call, **options):
    """Run a call token by token."""
    timed = {gate.name for gate in call.rule.gates if "T" in gate.axes}
    state, outputs = call.state, []
    for t in range(call.q.shape[1]):
        gates = {name: x[:, t] if name in timed else x for name, x in call.gates.items()}
        out, state = ops.step(call.rule, call.q[:, t], call.k[:, t], call.v[:, t], state=state, **options, **gates)
        outputs.append(out)
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("name", NAMES)
def test_a_step_honours_every_option_of_a_call(name):
    for constant in draw_call(name).rule.constants:
        # A count of steps, or a weight.
        other = type(constant.default)(3) if constant.whole or constant.default > 3 else 0.5 * constant.default + 0.1
        hold_to_the_call(name, **{constant.name: other})
    hold_to_the_call(name, scale=0.7)
    hold_to_the_call(name, scale=-1.3, use_qk_l2norm_in_kernel=True)


def hold_to_the_call(name, **options):
    call = draw_call(name, T=6, state=True)
    call.q, call.k = 1.7 * call.q, 1.7 * call.k if "use_qk_l2norm_in_kernel" in options else call.k
    got, want = stepped(call, **options), call.run(form="recurrent", **options)
    assert_close(outcome(call.rule, got), outcome(call.rule, want), torch.float64, what=str(options))
    plain = call.run(form="recurrent")[0]
    if name != "normalized_linear_attention" or "scale" not in options:  # its scale cancels
        assert not torch.equal(plain, want[0]), options


@pytest.mark.parametrize("name", ["retention", "mesa", "delta_product", "recursive_least_squares"])
def test_steps_fill_in_what_is_left_out_as_a_call_does(name):
    call = draw_call(name, T=6, state=True)
    for gate in call.rule.gates:
        if gate.optional:
            whole = outcome(call.rule, call.run(form="recurrent"))
            del call.gates[gate.name]
            got, want = outcome(call.rule, stepped(call)), outcome(call.rule, call.run(form="recurrent"))
            assert_close(got, want, torch.float64, what=gate.name)
            assert not torch.equal(want["o"], whole["o"]), gate.name


@pytest.mark.parametrize("name", NAMES)
def test_steps_read_no_memory_that_nobody_wrote(name):
    call = draw_call(name, T=10, dtype=torch.float32)
    runs = []
    for _ in range(2):
        for size in (16, 64, 256, 1024, 4096):  # what the allocator hands out next holds NaN
            torch.full((size,), torch.nan)
        runs.append(outcome(call.rule, stepped(call)))
    for key, x in runs[0].items():
        assert torch.equal(x, runs[1][key]), key
    assert_close(runs[0]["o"], call.run(form="recurrent")[0], torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_has_one_structure_after_any_number_of_tokens(name):
    rule = draw_call(name).rule
    sizes = {"G": 4, "H": 2, "K": 5, "V": 3}
    for dtype, wide in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ):
        for length in (0, 1, 2, 64, 100):
            call = draw_call(name, T=length, dtype=dtype)
            found = [call.run(**form)[1] for form in forms(rule)]
            if 0 < length < 3:
                found.append(stepped(call)[1])
            for state in found:
                assert type(state) is (rule.state_type or torch.Tensor)
                tensors = zip(rule.states.values(), rule.state_tensors(state), strict=True)
                for axes, tensor in tensors:
                    assert tuple(tensor.shape) == (2, *({**sizes, "S": length}[axis] for axis in axes))
                    assert tensor.dtype == (wide if axes else torch.int64)


@pytest.mark.parametrize("name", NAMES)
def test_the_scale_left_out_is_the_published_one(name):
    call = draw_call(name, T=6)
    one = name in ("momentum_delta_rule", "recursive_least_squares", "rwkv7", "mesa")
    want = call.run(scale=1.0 if one else call.q.shape[-1] ** -0.5)[0]
    assert torch.equal(call.run()[0], want)
    assert torch.equal(call.run(scale=None)[0], want)
