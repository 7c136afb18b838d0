"""The operators under torch.compile, torch.export, autocast and fake tensors."""

import pytest
import torch
import torch._dynamo.testing

from innerloop import ops, rules
from innerloop import rule as registry
from innerloop.testing import assert_close, draw_call, gradients, outcome

NAMES = [module.RULE.name for module in rules.ALL]


def flat(call, form):
    """Return a function of tensors alone, and the tensors."""
    names = list(call.tensors())

    def function(*tensors):
        given = dict(zip(names, tensors, strict=True))
        return tuple(outcome(call.rule, call.map(lambda name, _: given[name]).run(form=form)).values())

    return function, tuple(call.tensors().values())


@pytest.mark.parametrize("name", NAMES)
def test_operators_pass_the_frameworks_own_check(name):
    call = draw_call(name, T=5, state=True).tracked()
    rule = call.rule
    gates = rule.complete(call.gates, call.v)
    constants = [constant.default for constant in rule.constants]
    tokens = (call.q, call.k, call.v, *gates.values())
    states = rule.state_tensors(call.state)
    for packing in (None, torch.tensor([0, 2, 5])):
        rows = tokens if packing is None else [x[:1] for x in tokens]
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in (*rows, *states)]
        torch.library.opcheck(rule.loop._op, (*leaves, packing, 0.5, True, 2, constants))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_compiled_equals_eager_at_any_length_without_recompiling(name, form):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def compiled(q, k, v, gates):
        return ops.run(name, q, k, v, form=form, output_final_state=True, **gates)

    rule = registry.get(name)
    first = 0
    for length in (7, 64, 100):
        call = draw_call(name, T=length, B=2).tracked()
        result = compiled(call.q, call.k, call.v, call.gates)
        want = draw_call(name, T=length, B=2).tracked()
        truth = want.run(form=form)
        assert_close(outcome(rule, result), outcome(rule, truth), torch.float64, what=f"T={length}")
        assert_close(gradients(call, result), gradients(want, truth), torch.float64, "gradients", f"T={length}")
        first = first or counter.frame_count
    assert counter.frame_count == first


@pytest.mark.parametrize("name", NAMES)
def test_compiled_step_equals_eager(name):
    torch._dynamo.reset()
    call = draw_call(name, T=3, state=True)
    compiled = torch.compile(
        lambda q, k, v, state, gates: ops.step(name, q, k, v, state=state, **gates), fullgraph=True, backend="aot_eager"
    )
    timed = {gate.name for gate in call.rule.gates if "T" in gate.axes}
    token = [x[:, 0] for x in (call.q, call.k, call.v)]
    gates = {gate: x[:, 0] if gate in timed else x for gate, x in call.gates.items()}
    got = compiled(*token, call.state, gates)
    want = ops.step(name, *token, state=call.state, **gates)
    assert_close(outcome(call.rule, got), outcome(call.rule, want), torch.float64)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_exported_program_runs_at_another_length(name, form):
    call = draw_call(name, T=9)

    class Module(torch.nn.Module):
        def forward(self, q, k, v, gates):
            return ops.run(name, q, k, v, form=form, **gates)[0]

    length = torch.export.Dim("T", min=2, max=4096)
    timed = {gate.name for gate in call.rule.gates if "T" in gate.axes}
    shapes = (*({1: length},) * 3, {gate: {1: length} if gate in timed else {} for gate in call.gates})
    program = torch.export.export(Module(), (call.q, call.k, call.v, call.gates), dynamic_shapes=shapes)
    other = draw_call(name, T=21, seed=3)
    got = program.module()(other.q, other.k, other.v, other.gates)
    assert_close(got, other.run(form="recurrent")[0], torch.float64)


def test_a_packed_call_compiles_without_a_break():
    torch._dynamo.reset()
    compiled = torch.compile(ops.gated_delta_rule, fullgraph=True, backend="aot_eager")
    call = draw_call("gated_delta_rule", B=1)
    bounds = torch.tensor([0, 10, 37])
    got = compiled(call.q, call.k, call.v, **call.gates, cu_seqlens=bounds, output_final_state=True)
    want = call.run(cu_seqlens=bounds)
    assert_close(outcome(call.rule, got), outcome(call.rule, want), torch.float64)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
def test_the_default_compiler_runs_a_layer_around_an_op():
    torch._dynamo.reset()

    def layer(q, k, v, g, beta):
        o, _ = ops.gated_delta_rule(q, k, v, g=-torch.nn.functional.softplus(g), beta=beta.sigmoid())
        return torch.nn.functional.silu(o).sum()

    call = draw_call("gated_delta_rule", dtype=torch.float32).tracked()
    inputs = list(call.tensors().values())
    want = torch.autograd.grad(layer(*inputs), inputs)
    got = torch.autograd.grad(torch.compile(layer, fullgraph=True)(*inputs), inputs)
    for x, y in zip(got, want, strict=True):
        assert_close(x, y, torch.float32, "gradients")


@pytest.mark.parametrize("name", NAMES)
def test_autocast_keeps_arithmetic_and_state_wide(name):
    call = draw_call(name, dtype=torch.float32, state=True).tracked()
    for form in ("recurrent", "chunk"):
        want = call.run(form=form)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = call.run(form=form)
            slopes = gradients(call, got)
        for key, x in outcome(call.rule, got).items():
            assert torch.equal(x, outcome(call.rule, want)[key])
        assert_close(slopes, gradients(call, want), torch.float32, "gradients")
    token = [x[:, 0] for x in (call.q, call.k, call.v)]
    timed = {gate.name for gate in call.rule.gates if "T" in gate.axes}
    gates = {gate: x[:, 0] if gate in timed else x for gate, x in call.gates.items()}
    want = ops.step(name, *token, state=call.state, **gates)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = ops.step(name, *token, state=call.state, **gates)
    for key, x in outcome(call.rule, got).items():
        assert torch.equal(x, outcome(call.rule, want)[key])


@pytest.mark.parametrize("name", NAMES)
def test_half_inputs_with_wide_gates_give_half_outputs_and_a_wide_state(name):
    call = draw_call(name, dtype=torch.bfloat16)
    call.gates = {gate: x.float() for gate, x in call.gates.items()}
    call = call.tracked()
    for form in ("recurrent", "chunk"):
        out, state = call.run(form=form)
        assert out.dtype == torch.bfloat16
        assert all(x.dtype == torch.float32 for x in call.rule.state_tensors(state) if x.is_floating_point())
        for key, slope in gradients(call, (out, state)).items():
            assert slope.dtype == call.tensors()[key].dtype
