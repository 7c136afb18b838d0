"""Which form a call takes, what it hands back, and what ``explain`` says of it."""

from fractions import Fraction
from typing import ClassVar

import numpy as np
import pytest
import torch

from innerloop import Rule, explain, ops, register, rules
from innerloop import rule as registry
from innerloop.testing import draw_call

NAMES = tuple(module.RULE.name for module in rules.ALL)


class Told(Rule):
    """Reads 1 in its chunk form, 0 in its token loop."""

    name = "told_of_a_test"
    departs = "it tells which form ran"
    states: ClassVar = {"S": ("G", "K", "V")}

    def step(self, q, k, v, *, state):
        return torch.zeros_like(v), state

    def chunk(self, q, k, v, *, state, options):
        return torch.ones_like(v), v.new_zeros((*v.shape[:1], v.shape[2], k.shape[3], v.shape[3]))


def test_one_token_takes_the_loop_and_more_the_chunk_form():
    rule = register(Told())
    for length, form, chunked in (
        (0, "auto", True),
        (1, "auto", False),
        (2, "auto", True),
        (1, "chunk", True),
        (9, "recurrent", False),
    ):
        call = draw_call(rule.name, T=length)
        out, _ = call.run(form=form)
        assert out.shape == call.v.shape
        assert bool((out == chunked).all())
        plan = explain(ops.run, rule, call.q, call.k, call.v, form=form)
        assert plan.form == ("chunk" if chunked else "recurrent")
        assert plan.chunk_size == (64 if chunked else None)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_comes_back_only_where_it_was_asked_for(name):
    call = draw_call(name, T=4, state=True)
    for form in ("auto", "recurrent"):
        for asked in (True, False):
            _, state = call.run(form=form, output_final_state=asked)
            assert (state is not None) == asked


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_step_reads_in_the_dtype_of_v_and_keeps_a_wide_state(name, dtype):
    token = draw_call(name, T=1, dtype=dtype)
    timed = {gate.name for gate in token.rule.gates if "T" in gate.axes}
    gates = {gate: x[:, 0] if gate in timed and x is not None else x for gate, x in token.gates.items()}
    out, state = ops.step(name, token.q[:, 0], token.k[:, 0], token.v[:, 0], state=None, **gates)
    assert out.dtype == dtype
    for tensor, axes in zip(token.rule.state_tensors(state), token.rule.states.values(), strict=True):
        assert tensor.dtype == ((torch.float64 if dtype == torch.float64 else torch.float32) if axes else torch.int64)


def test_fake_tensors_pass_where_no_mode_says_that_they_are_fake():
    call = draw_call("gated_delta_rule", T=5, state=True)
    call.run()
    mode = torch._subclasses.FakeTensorMode()
    fake = call.map(lambda _, x: mode.from_tensor(x))
    for form in ("chunk", "recurrent"):
        out, state = fake.run(form=form)
        assert type(out) is type(fake.q)
        assert out.shape == call.v.shape
        assert state.shape == call.state.shape


def test_a_step_refuses_odd_options():
    q, k, v = torch.randn(3, 1, 2, 4).unbind(0)
    with pytest.raises(TypeError, match="use_qk_l2norm_in_kernel must be True or False; got 1"):
        ops.step("linear_attention", q, k, v, state=None, use_qk_l2norm_in_kernel=1)
    with pytest.raises(ValueError, match="scale must be finite; got inf"):
        ops.step("linear_attention", q, k, v, state=None, scale=float("inf"))


def test_any_real_number_is_a_scale_but_truth_is_not():
    call = draw_call("linear_attention", T=5)
    want, _ = call.run(scale=0.5)
    for scale in (Fraction(1, 2), np.float32(0.5), np.float64(0.5)):
        assert torch.equal(call.run(scale=scale)[0], want)
    assert torch.equal(call.run(scale=2)[0], call.run(scale=2.0)[0])
    with pytest.raises(TypeError, match="scale must be a number; got bool"):
        call.run(scale=True)
    with pytest.raises(TypeError, match="scale must be a number; got str"):
        call.run(scale="1")


def test_whether_a_state_is_wanted_is_true_or_false():
    call = draw_call("linear_attention", T=5)
    with pytest.raises(TypeError, match="output_final_state must be True or False; got 'yes'"):
        call.run(output_final_state="yes")
    with pytest.raises(ValueError, match="scale must be finite; got a whole number beyond the floats"):
        call.run(scale=10**400)
    assert torch.equal(call.run(form="chunk", chunk_size=np.int64(2))[0], call.run(form="chunk", chunk_size=2)[0])


def test_a_plan_says_in_words_which_path_and_why():
    call = draw_call("linear_attention", T=100, G=2)
    given = (ops.linear_attention, call.q, call.k, call.v)
    assert str(explain(*given, backend="torch")).splitlines() == [
        "linear_attention: chunk form in chunks of 64, torch backend",
        "  T = 100: the chunk form is parallel in time",
        "  backend='torch' was asked for",
    ]
    assert str(explain(ops.softmax_attention, *given[1:])).splitlines() == [
        "softmax_attention: chunk form, torch backend",
        "  T = 100: the chunk form is parallel in time",
        "  softmax_attention has no native kernel",
    ]
    assert str(explain(*given, form="recurrent", backend="torch")).splitlines() == [
        "linear_attention: recurrent form, torch backend",
        "  form='recurrent' was asked for",
        "  backend='torch' was asked for",
    ]
    short = draw_call("linear_attention", T=1)
    assert "T = 1: one token is one step" in str(explain(ops.linear_attention, short.q, short.k, short.v))
    loops = registry.get(register(_Loops()).name)
    assert "loops_of_a_test has no form that is parallel in time" in str(explain(ops.run, loops, *given[1:]))


def test_a_rule_without_a_chunk_form_is_not_asked_for_one():
    loops = register(_Loops("loops_alone_of_a_test"))
    q, k, v = torch.randn(3, 1, 5, 2, 4).unbind(0)
    with pytest.raises(ValueError, match="form must be 'recurrent' or 'auto' for loops_alone_of_a_test"):
        ops.run(loops, q, k, v, form="chunk")
    with pytest.raises(TypeError, match="chunk_size must be an int or None; got bool"):
        ops.run(loops, q, k, v, chunk_size=True)
    ops.run(loops, q, k, v)


class _Loops(Rule):
    departs = "it fits nothing"

    def __init__(self, name="loops_of_a_test"):
        self.name = name

    def step(self, q, k, v, *, state):
        return v, state


def test_a_step_that_looks_like_the_last_one_is_still_checked():
    q, k, v = torch.randn(3, 1, 2, 4).unbind(0)
    state = torch.zeros(1, 2, 4, 4)
    ops.step("linear_attention", q, k, v, state=state, scale=1.0, use_qk_l2norm_in_kernel=True, overwrite_state=True)
    for wrong in ({"scale": True}, {"use_qk_l2norm_in_kernel": 1}, {"overwrite_state": 1}):
        options = {"scale": 1.0, "use_qk_l2norm_in_kernel": True, "overwrite_state": True, **wrong}
        with pytest.raises(TypeError, match=next(iter(wrong))):
            ops.step("linear_attention", q, k, v, state=state, **options)
    ops.step("linear_attention", q, k, v, state=state)
    for name, wrong in (("q", q.tolist()), ("k", k[..., :3]), ("v", v.double()), ("v", v.tolist())):
        with pytest.raises((TypeError, ValueError), match=name):
            ops.step("linear_attention", **{"q": q, "k": k, "v": v, name: wrong}, state=state)
