"""A wrong call gives one clear line: what, wanted, got, cure."""

import math

import numpy as np
import pytest
import torch

from innerloop import explain, ops, register, rules
from innerloop import rule as registry
from innerloop.checks import refusal
from innerloop.rule import Gate, Rule
from innerloop.testing import draw_call

NAMES = tuple(module.RULE.name for module in rules.ALL)


def wrong(call, error, match, **options):
    with pytest.raises(error, match=match) as caught:
        call.run(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_shape_names_axes_and_sizes(name):
    call = draw_call(name)
    call.v = call.v[:, :-1]
    wrong(call, ValueError, r"v must have shape \[B, T, (n, )?., V\] with B=2, T=37.*got \[2, 36")


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_axis_is_named(name):
    call = draw_call(name)
    call.k = call.k[0]
    wrong(call, ValueError, r"k must have shape \[B, T, (n, )?H, K\].*got \[37, (2, )?2, 5\]")


def test_no_steps_a_token_are_refused():
    call = draw_call("delta_product").map(lambda name, x: x[:, :, :0] if name in ("k", "v", "beta") else x)
    wrong(call, ValueError, "n must be at least 1; got 0")


@pytest.mark.parametrize("name", NAMES)
def test_heads_that_do_not_divide_are_named(name):
    call = draw_call(name, H=3, G=4)
    wrong(call, ValueError, r"must have a multiple of .* heads; got 4 and 3")


@pytest.mark.parametrize("name", NAMES)
def test_an_integer_input_is_a_type_error(name):
    call = draw_call(name)
    call.q = call.q.long()
    wrong(call, TypeError, "q must have dtype float64, float32, bfloat16, float16; got int64")


@pytest.mark.parametrize("name", NAMES)
def test_mixed_precision_says_how_to_convert(name):
    call = draw_call(name)
    call.v = call.v.float()
    wrong(call, TypeError, r"q, k and v must share a dtype; got q float64, v float32. Convert with v.to\(torch.fl")


@pytest.mark.parametrize("name", NAMES)
def test_something_else_than_a_tensor_is_a_type_error(name):
    call = draw_call(name)
    q, call.q = call.q, call.q.numpy()
    wrong(call, TypeError, "q must be a torch.Tensor; got ndarray")
    call.q = q
    call.gates = {**call.gates, **{gate.name: 0.5 for gate in call.rule.gates}}
    for gate in call.rule.gates:
        with pytest.raises(TypeError, match=f"{gate.name} must be a torch.Tensor; got float"):
            call.run()
        break


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_form_or_backend_lists_the_known(name):
    call = draw_call(name)
    wrong(call, ValueError, "form must be one of 'auto', 'recurrent', 'chunk'; got 'parallel'", form="parallel")
    wrong(call, ValueError, "backend must be None or one of 'torch', 'cpu'; got 'triton'", backend="triton")
    if refusal(call.rule):
        wrong(call, RuntimeError, "backend='cpu' cannot serve: .*Leave backend unset", backend="cpu")


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_option_is_named(name):
    call = draw_call(name)
    wrong(call, ValueError, "chunk_size must be at least 1; got 0", chunk_size=0)
    wrong(call, TypeError, "chunk_size must be an int or None; got float", chunk_size=4.0)
    wrong(call, ValueError, "scale must be finite; got inf", scale=float("inf"))
    wrong(call, TypeError, "scale must be a number; got str", scale="1")


@pytest.mark.parametrize("name", [name for name in NAMES if any(g.name == "g" for g in registry.get(name).gates)])
def test_a_positive_log_decay_says_what_g_is(name):
    call = draw_call(name)
    call.gates["g"].flatten()[3] = 0.25
    wrong(call, ValueError, r"g must lie in \[-inf, 0\]; got a maximum of 0.25. It is the natural log of the decay")


@pytest.mark.parametrize("name", [name for name in NAMES if registry.get(name).gates])
def test_a_nan_gate_is_named(name):
    call = draw_call(name)
    gate = call.rule.gates[-1].name
    call.gates[gate].flatten()[0] = torch.nan
    wrong(call, ValueError, f"{gate} must not hold NaN")


def test_a_negative_weight_of_longhorn_is_named():
    call = draw_call("longhorn")
    call.gates["beta"][0, 0, 0] = -1
    wrong(call, ValueError, r"beta must lie in \[0, inf\]; got a minimum of -1")


def test_removal_keys_have_the_heads_of_keys():
    call = draw_call("rwkv7")
    call.gates["kappa"] = call.gates["kappa"].repeat_interleave(2, 2)
    wrong(call, ValueError, r"kappa must have shape \[B, T, H, K\] with B=2, T=37, H=2, K=5; got \[2, 37, 4, 5\]")


def test_the_ridge_must_be_above_zero():
    call = draw_call("recursive_least_squares")
    for value in (0.0, -1.0, float("nan")):
        wrong(call, ValueError, "ridge must be finite and above 0; got", ridge=value)
    with pytest.raises(TypeError, match="ridge must be a number; got Tensor"):
        call.run(ridge=torch.ones(1))


@pytest.mark.parametrize("name", NAMES)
def test_a_gate_in_a_foreign_precision_is_a_type_error(name):
    call = draw_call(name, dtype=torch.float32)
    for gate, value in call.gates.items():
        call.gates[gate] = value.half()
        wrong(call, TypeError, f"{gate} must have q's dtype float32; got float16")
        break


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_state_is_named(name):
    call = draw_call(name, state=True)
    tensors = [x[:1] for x in call.rule.state_tensors(call.state)]
    call.state = call.rule.packed_state(tensors)
    wrong(call, ValueError, r"the initial state.* must have shape \[N, .*N=2.*; got \[1")
    if call.rule.state_type is not None:
        call.state = tensors[0]
        wrong(call, TypeError, f"the state of {name} must be {call.rule.state_type.__name__}")


class OddGate(Rule):
    """Scales what it writes by a gate of any axes."""

    name = "odd_gate_of_a_test"
    departs = "it is scaled"

    def step(self, q, k, v, *, gate, state):
        state = state + k[..., None] * (gate.view(*gate.shape[:2], -1)[..., :1] * v)[..., None, :]
        return torch.einsum("bgkv,bgk->bgv", state, q), state


class FilledIn(OddGate):
    """The same, with a value for every token."""

    name = "filled_in_of_a_test"

    def complete(self, gates, v):
        return {"gate": gates["gate"].expand(*v.shape[:-1], -1)}


def test_a_gate_that_tokens_share_needs_to_be_given_to_each():
    for axes in (("G", "V"), ("G",), ("H", "K")):
        OddGate.gates = (Gate("gate", low=0.0, high=1.0, axes=axes),)
        with pytest.raises(ValueError, match=r"axes that begin with B, T, or the rule must define complete\("):
            register(OddGate())
    FilledIn.gates = (Gate("gate", low=0.0, high=1.0, axes=("G", "V")),)
    call = draw_call(register(FilledIn()), T=5, G=4, V=5)
    out, state = None, None
    for t in range(5):
        token = (x[:, t] for x in (call.q, call.k, call.v))
        out, state = ops.step("filled_in_of_a_test", *token, state=state, **call.gates)
    assert torch.equal(call.run()[0][:, -1], out)


def test_a_gate_of_key_heads_comes_to_step_with_value_heads_on_any_axis():
    OddGate.gates = (Gate("gate", low=0.0, high=1.0, axes=("B", "T", "H")),)
    call = draw_call(register(OddGate()), T=5, H=2, G=4)
    gate = call.gates["gate"].repeat_interleave(2, -1)[..., None]  # [B, T, G, 1]
    want, _ = ops.linear_attention(call.q, call.k, gate * call.v)
    assert torch.allclose(call.run()[0], want, atol=1e-10)


def test_a_call_like_one_that_passed_is_still_looked_at():
    call = draw_call("momentum_delta_rule", T=3, state=True)
    call.run()
    call.state = torch.stack(tuple(call.state))  # the same shapes row by row, but no MomentumState
    wrong(call, TypeError, "the state of momentum_delta_rule must be MomentumState")
    for length in (3, 200):  # few numbers, and many
        call = draw_call("gated_delta_rule", T=length)
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            call.run()  # nothing to look at
        call.run()
        good = dict(call.gates)
        beside = torch.tensor(2)
        for name, value, error, words in (
            ("g", good["g"].index_fill(1, beside, 1e-6), ValueError, "a maximum of 1e-06"),
            ("g", good["g"].index_fill(1, beside, math.nan), ValueError, "g must not hold NaN"),
            ("beta", good["beta"].index_fill(1, beside, math.nan), ValueError, "beta must not hold NaN"),
            ("beta", good["beta"].half(), TypeError, "got float16"),
        ):
            call.gates = good | {name: value}
            wrong(call, error, words)
        call.gates = good
        call.run()


def test_wrong_packing_is_named():
    call = draw_call("delta_rule", B=1)
    wrong(call, ValueError, r"cu_seqlens must rise from at least 0 to at most T=37; got \[0, 9, 4\]",
          cu_seqlens=torch.tensor([0, 9, 4]))  # fmt: skip
    wrong(call, ValueError, "at most T=37", cu_seqlens=torch.tensor([0, 38]))
    wrong(call, ValueError, r"cu_seqlens must have shape \[N\+1\]", cu_seqlens=torch.tensor([0]))
    wrong(call, TypeError, "cu_seqlens must be an int32 or int64 tensor.*got list", cu_seqlens=[0, 37])
    wrong(draw_call("delta_rule"), ValueError, "B must be 1; got B=2", cu_seqlens=torch.tensor([0, 37]))


@pytest.mark.parametrize("name", NAMES)
def test_run_and_step_name_a_missing_and_an_unknown_gate(name):
    call = draw_call(name)
    token = [x[:, 0] for x in (call.q, call.k, call.v)]
    required = [gate.name for gate in call.rule.gates if not gate.optional]
    for gate in required[:1]:
        some = {other: x for other, x in call.gates.items() if other != gate}
        with pytest.raises(ValueError, match=f"{name} needs the gate '{gate}'; got "):
            ops.run(name, call.q, call.k, call.v, **some)
        with pytest.raises(ValueError, match=f"{name} needs the gate '{gate}'; got "):
            ops.step(name, *token, state=None)
    for function, inputs in ((ops.run, (call.q, call.k, call.v)), (ops.step, token)):
        state = {} if function is ops.run else {"state": None}
        with pytest.raises(ValueError, match=f"{name} takes .*; got an unknown 'gamma'"):
            function(name, *inputs, gamma=call.v, **state)


def test_step_checks_shapes_but_not_values():
    call = draw_call("gated_delta_rule")
    q, k, v = (x[:, 0] for x in (call.q, call.k, call.v))
    gates = {name: x[:, 0] for name, x in call.gates.items()}
    with pytest.raises(ValueError, match=r"beta must have shape \[B, G\] with B=2, G=4; got \[2, 37, 4\]"):
        ops.step("gated_delta_rule", q, k, v, state=None, g=gates["g"], beta=call.gates["beta"])
    ops.step("gated_delta_rule", q, k, v, state=None, g=-gates["g"], beta=gates["beta"])


def test_a_call_that_passed_once_is_still_checked_when_it_changes():
    call = draw_call("delta_rule")
    call.run()
    call.gates["beta"] = call.gates["beta"][:, :, :2]
    wrong(call, ValueError, r"beta must have shape \[B, T, G\].*got \[2, 37, 2\]")


def test_an_unknown_rule_lists_the_known():
    call = draw_call("delta_rule")
    with pytest.raises(ValueError, match=r"rule must be one of softmax_attention, .*got 'delta'"):
        ops.run("delta", call.q, call.k, call.v)


def test_a_bad_rule_is_refused_with_the_reason():
    class Good(Rule):
        name = "good_rule_of_a_test"
        departs = "made up"

        def step(self, q, k, v, *, state):
            return v, state

    def variant(**changes):
        return type("Changed", (Good,), changes)()

    for changes, match in (
        ({"name": "not a name"}, "must be a Python identifier"),
        ({"name": "delta_rule"}, "'delta_rule' is taken"),
        ({"step": Rule.step}, "must define step"),
        ({"departs": ""}, "it has neither"),
        ({"states": {"S": ("G", "K", "V"), "z": ("G", "K")}}, "must set state_type"),
        ({"gates": (Gate("scale", low=0, high=1),)}, "'scale' is taken"),
        ({"gates": (Gate("a", low=0, high=1), Gate("a", low=0, high=1))}, "'a' is taken"),
    ):
        with pytest.raises(ValueError, match=match):
            register(variant(**changes))
    with pytest.raises(TypeError, match="got the class Good, not yet called"):
        register(Good)
    with pytest.raises(ValueError, match="must be registered before it is used"):
        ops.run(Good(), *(np.zeros(1),) * 3)


def test_explain_says_which_path_and_why():
    call = draw_call("gated_delta_rule")
    plan = explain(ops.gated_delta_rule, call.q, call.k, call.v, **call.gates, backend="torch")
    assert (plan.form, plan.backend, plan.chunk_size) == ("chunk", "torch", 64)
    one = call.tokens(0, 1)
    assert explain(ops.run, "gated_delta_rule", one.q, one.k, one.v, **one.gates).form == "recurrent"
    with pytest.raises(ValueError, match="form must be"):
        explain(ops.gated_delta_rule, call.q, call.k, call.v, **call.gates, form="fast")
    with pytest.raises(TypeError, match=r"explain takes a function of innerloop\.ops"):
        explain(torch.add, 1, 2)
    token = [x[:, 0] for x in (call.q, call.k, call.v)]
    gates = {name: x[:, 0] for name, x in call.gates.items()}
    assert explain(ops.step, "gated_delta_rule", *token, state=None, **gates).form == "step"


@pytest.mark.parametrize("name", NAMES)
def test_a_gate_that_is_none_is_missing(name):
    call = draw_call(name)
    required = [gate.name for gate in call.rule.gates if not gate.optional]
    for gate in required:
        for form in ("recurrent", "chunk"):
            with pytest.raises(ValueError, match=f"{name} needs the gate '{gate}'; got None"):
                getattr(ops, name)(call.q, call.k, call.v, **{**call.gates, gate: None}, form=form)
        with pytest.raises(ValueError, match=f"{name} needs the gate '{gate}'"):
            ops.run(name, call.q, call.k, call.v, **{**call.gates, gate: None})


def test_gates_outside_of_packing_may_be_anything():
    call = draw_call("gated_delta_rule", B=1, T=9)
    want, _ = call.run(cu_seqlens=torch.tensor([1, 4, 8]))
    for gate in call.gates.values():
        gate[:, 0] = gate[:, 8] = torch.nan
    call.gates["g"][:, 8] = 3.0
    got, _ = call.run(cu_seqlens=torch.tensor([1, 4, 8]))
    assert torch.equal(got, want)
    call.gates["g"][:, 4] = torch.nan
    wrong(call, ValueError, "g must not hold NaN", cu_seqlens=torch.tensor([1, 4, 8]))


def test_lengths_beyond_their_room_are_named():
    call = draw_call("softmax_attention", state=True)
    call.state = call.state._replace(lengths=call.state.lengths + 3)
    wrong(call, ValueError, r"the state's lengths must lie in \[0, S=7\]; got \[10, 10\]")


def test_odd_options_are_named():
    call = draw_call("delta_rule")
    wrong(call, TypeError, "use_qk_l2norm_in_kernel must be True or False; got 'no'", use_qk_l2norm_in_kernel="no")
    token = [x[:, 0] for x in (call.q, call.k, call.v)]
    with pytest.raises(ValueError, match="scale must be finite; got nan"):
        ops.step("delta_rule", *token, state=None, beta=call.gates["beta"][:, 0], scale=float("nan"))
    with pytest.raises(TypeError, match="rule must be a name or a registered Rule; got list"):
        ops.run([], call.q, call.k, call.v)
    with pytest.raises(ValueError, match=r"the state must have shape \[N, G, K, V\].*N=2"):
        ops.step("delta_rule", *token, state=torch.zeros(1, 4, 5, 3), beta=call.gates["beta"][:, 0])


def test_a_rule_that_contradicts_itself_is_refused():
    class Base(Rule):
        name = "contradiction_of_a_test"
        departs = "made up"
        gates = (Gate("beta", low=0.0, high=1.0),)

        def step(self, q, k, v, *, beta, state):
            return v, state

    def variant(**changes):
        return type("Changed", (Base,), changes)()

    def without_beta(self, q, k, v, *, state):
        return v, state

    for changes, error, match in (
        ({"states": {"S": ("G", "X")}}, ValueError, "state S must have axes of G, K, V, H, S; got X"),
        (
            {"gates": (Gate("beta", low=0.0, high=1.0, axes=("B", "Z")),)},
            ValueError,
            "gate beta must have axes .* got Z",
        ),
        ({"gates": (Gate("beta", low=1.0, high=0.0),)}, ValueError, "must have low < high; got 1.0 and 0.0"),
        ({"gates": ("beta",)}, TypeError, "gates must be a tuple of Gate"),
        ({"name": "class"}, ValueError, "must be a Python identifier"),
        ({"name": None}, ValueError, "must be a Python identifier"),
        ({"step": without_beta}, ValueError, "step must take beta, state by keyword; it does not take beta"),
        (
            {"states": {"S": ("G", "K"), "z": ("G", "K")}, "state_type": ops.MomentState},
            ValueError,
            r"state_type must be a NamedTuple of S, z; its fields are \('H_kk', 'H_kv'\)",
        ),
    ):
        with pytest.raises(error, match=match):
            register(variant(**changes))

    class Alone(Base):
        name = "alone_of_a_test"

        def step(self, q, k, v, *, beta, state):
            return v

    register(Alone())
    with pytest.raises(TypeError, match=r"alone_of_a_test.step must return \(o, state\); got Tensor"):
        draw_call("alone_of_a_test").run()
