"""The operators under torch.compile, torch.export, autocast and fake tensors."""

import pytest
import torch
import torch._dynamo.testing
from torch.utils import _pytree as pytree

from innerloop import ops, rules, states
from innerloop import rule as registry
from innerloop.testing import assert_close, draw_call, gradients, outcome

NAMES = tuple(module.RULE.name for module in rules.ALL)


def tokens_at(call, t):
    """Return q, k, v and the gates of one token, as a step takes them."""
    timed = {gate.name for gate in call.rule.gates if "T" in gate.axes}
    gates = {name: x[:, t] if name in timed else x for name, x in call.gates.items()}
    return call.q[:, t], call.k[:, t], call.v[:, t], gates


@pytest.mark.parametrize("name", NAMES)
def test_operators_pass_the_frameworks_own_check(name):
    call = draw_call(name, T=5, state=True).tracked()
    rule = call.rule
    gates = rule.complete(call.gates, call.v)
    constants = [constant.default for constant in rule.constants]
    tokens = (call.q, call.k, call.v, *gates.values())
    states = rule.state_tensors(call.state)
    bounds = torch.tensor([0, 2, 5])
    rooms = [int((states[-1] + bounds.diff()).max())] if rule.grows else []
    for packing, room in ((None, 0), (bounds, 0), *((bounds, room) for room in rooms)):
        rows = tokens if packing is None else [x[:1] for x in tokens]
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in (*rows, *states)]
        torch.library.opcheck(rule.loop._op, (*leaves, packing, 0.5, True, 2, constants, room, True))


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
    for length in (7, 64, 100) if form == "chunk" else (7, 12, 21):
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
    call = draw_call(name, T=9, state=True)

    class Module(torch.nn.Module):
        def forward(self, q, k, v, gates, state):
            return ops.run(name, q, k, v, form=form, initial_state=state, output_final_state=True, **gates)

    length = torch.export.Dim("T", min=2, max=4096)
    timed = {gate.name for gate in call.rule.gates if "T" in gate.axes}
    gates = {gate: {1: length} if gate in timed else {} for gate in call.gates}
    states = pytree.tree_map(lambda _: {}, call.state)
    program = torch.export.export(
        Module(), (call.q, call.k, call.v, call.gates, call.state), dynamic_shapes=(*({1: length},) * 3, gates, states)
    )
    for other in (draw_call(name, T=21, seed=3, state=True), draw_call(name, T=2, seed=4, state=True)):
        got = program.module()(other.q, other.k, other.v, other.gates, other.state)
        assert_close(outcome(call.rule, got), outcome(call.rule, other.run(form="recurrent")), torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_exported_step_goes_on_as_the_eager_one(name):
    call = draw_call(name, T=3, state=True)

    class Module(torch.nn.Module):
        def forward(self, q, k, v, gates, state):
            return ops.step(name, q, k, v, state=state, **gates)

    program = None
    state, truth = call.state, call.state
    for t in range(3):
        token = tokens_at(call, t)
        if program is None or call.rule.grows:  # the room of a state that grows is a size like any other
            program = torch.export.export(Module(), (*token, state)).module()
        got = program(*token, state)
        want = ops.step(name, *token[:3], state=truth, **token[3])
        assert_close(outcome(call.rule, got), outcome(call.rule, want), torch.float64, what=f"token {t}")
        state, truth = got[1], want[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_several_calls_is_mapped(name):
    call = draw_call(name, T=1, state=True)
    names, tensors = list(call.tensors()), list(call.tensors().values())

    def step(*tensors):
        given = dict(zip(names, tensors, strict=True))
        one = call.map(lambda name, _: given[name])
        *token, gates = tokens_at(one, 0)
        return tuple(outcome(call.rule, ops.step(name, *token, state=one.state, **gates)).values())

    several = [torch.stack((x, 0.5 * x)) for x in tensors]
    got = torch.func.vmap(step)(*several)
    for i in range(2):
        for x, y in zip(got, step(*(x[i] for x in several)), strict=True):
            assert_close(x[i], y, torch.float64)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_packed_calls_compile_without_a_break_or_a_length_of_their_own(name, form):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def compiled(q, k, v, gates, bounds):
        return ops.run(name, q, k, v, form=form, output_final_state=True, cu_seqlens=bounds, **gates)

    first = 0
    # Seven bounds at first: a compiler takes sizes that are equal, as N + 1 and V may be, for one size.
    for bounds in ([0, 10, 12, 12, 30, 31, 37], [0, 5, 5, 64], [1, 3, 20, 90, 99]):
        call = draw_call(name, T=bounds[-1] + 1, B=1)
        packing = torch.tensor(bounds)
        got = compiled(call.q, call.k, call.v, call.gates, packing)
        if call.rule.grows:  # a compiler must not look at lengths, so that there is room for any
            got = got[0], states.crop(name, got[1], packing.diff())
        assert_close(
            outcome(call.rule, got), outcome(call.rule, call.run(cu_seqlens=packing, form=form)), torch.float64
        )
        first = first or counter.frame_count
    assert counter.frame_count == first


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
