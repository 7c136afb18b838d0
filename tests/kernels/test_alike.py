"""A call that is like the last one skips what was asked of it: what is not like it must be noticed."""

import gc
import weakref

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from innerloop import ops
from innerloop.kernels import alike
from innerloop.kernels.native import missing
from innerloop.testing import assert_close, draw_call, gradients, outcome, truth


@pytest.fixture(params=["torch's", "asked in Python"])
def way(request, monkeypatch):
    if request.param != "torch's":
        monkeypatch.setattr(alike, "TensorGuards", None)
    elif alike.TensorGuards is None:
        pytest.skip("this torch has none")


class Other(torch.Tensor):
    """A subclass."""


class Mode(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_only_what_is_alike_is_so(way):
    x, y = torch.randn(2, 3, 4), torch.randn(2, 3)
    same = alike.alike([x, y])
    assert same(x, y) and same(x.clone(), torch.zeros(2, 3))
    for other in (
        x[:1], x.double(), x.to("meta"), x.clone().requires_grad_(), torch._neg_view(x), x.as_subclass(Other),
        x.transpose(0, 1).contiguous().transpose(0, 1), x[..., None], torch.nn.Parameter(x, requires_grad=False),
        None, 1.0, [1.0],
    ):  # fmt: skip
        assert not same(other, y), other
    with Mode():
        assert not same(x, y)
    seen = []
    torch.func.vmap(lambda z: (seen.append(same(z, y)), z)[1])(torch.stack((x, x)))
    torch.func.grad(lambda z: (seen.append(same(z, y)), seen.append(same(x, y)), z.sum())[2])(x)
    assert seen == [False, False, False]


def test_what_is_left_out_is_alike_only_to_what_is_left_out(way):
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    same = alike.alike([x, None, y, None])
    assert same(x, None, y, None) and same(y.clone(), None, x, None)
    for others in ((x, y, None, None), (x, None, None, y), (x, y, y, None), (x, None, y, 1.0), (x, None, 1.0, None),
                   (x, None, y[:1], None), (None, None, x, y)):  # fmt: skip
        assert not same(*others), others
    assert not alike.alike([x, y])(x, None)


def test_tensors_given_twice_are_alike_too(way):
    x = torch.randn(2, 3)
    same = alike.alike([x, x])
    assert same(x, x) and same(*[x.clone()] * 2) and not same(x, x.clone()) and not same(*[x[:1]] * 2)
    assert not alike.alike([x, x.clone()])(x, x)


def test_no_tensor_is_kept_alive(way):
    x = torch.randn(2, 3)
    same, gone = alike.alike([x]), weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None and same(torch.zeros(2, 3))


def test_tangents_and_compilers_close_the_way():
    assert alike.is_open()
    with forward_ad.dual_level():
        assert not alike.is_open()
    seen = []
    torch.compile(lambda x: (seen.append(alike.is_open()), x + 1)[1], backend="eager")(torch.zeros(1))
    assert seen == [False]


@pytest.mark.skipif(bool(missing()), reason=missing() or "present")
@pytest.mark.parametrize("name", ["gated_delta_rule", "kda", "momentum_delta_rule"])
def test_calls_that_differ_in_one_property_take_turns_and_stay_right(name, way):
    base = draw_call(name, T=5, K=6, V=4, B=2, state=True, dtype=torch.float32)
    apart = base.map(lambda _, x: torch.stack((x, x), -1)[..., 0])
    views = base.map(lambda n, x: torch._neg_view(-x))
    calls = [base, base.to(torch.float64), apart, views, draw_call(name, T=5, K=6, V=4, B=2, dtype=torch.float32),
             base.tracked(), draw_call(name, T=4, K=6, V=4, B=2, state=True, dtype=torch.float32)]  # fmt: skip
    wanted = [truth(call) for call in calls]
    for quiet_first in (True, False):
        for call, (values, slopes) in zip(calls, wanted, strict=True):
            if quiet_first:
                with torch.no_grad():
                    assert not call.run()[0].requires_grad
            result = call.run()
            assert_close(outcome(call.rule, result), values, call.v.dtype)
            assert result[0].requires_grad == call.q.requires_grad
            if call.q.requires_grad:
                assert_close(gradients(call, result), slopes, call.v.dtype, "gradients")
            with torch.no_grad():
                assert not call.run()[0].requires_grad, "a call like the last one but for the mode"


@pytest.mark.parametrize("again", [False, True])
def test_an_overwritten_state_is_known_to_have_changed(again):
    for _ in range(1 + again):  # the second step is like the first
        call = draw_call("delta_rule", T=1, state=True)
        q, k, v, beta = (x[:, 0] for x in (call.q, call.k, call.v, call.gates["beta"]))
        weight = torch.ones_like(call.state).requires_grad_()
        y = (call.state * weight).sum()
        with torch.no_grad():
            ops.step("delta_rule", q, k, v, beta=beta, state=call.state, overwrite_state=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_two_states_in_one_tensor_are_not_overwritten(way):
    call = draw_call("momentum_delta_rule", T=1, state=True)
    q, k, v, *gates = (x[:, 0] for x in (call.q, call.k, call.v, *call.gates.values()))
    named = dict(zip(call.gates, gates, strict=True))
    ops.step(call.rule, q, k, v, state=call.map(lambda _, x: x.clone()).state, overwrite_state=True, **named)
    with pytest.raises(ValueError, match="a tensor each for S, U; got one twice"):
        twice = type(call.state)(call.state[0], call.state[0])
        ops.step(call.rule, q, k, v, state=twice, overwrite_state=True, **named)


@pytest.mark.skipif(bool(missing()), reason=missing() or "present")
def test_steps_that_differ_in_one_property_take_turns_and_stay_right(way):
    base = draw_call("gated_delta_rule", T=1, K=6, V=4, B=2, state=True, dtype=torch.float32)
    half = base.map(lambda n, x: x if n == "S" else x.bfloat16())
    strided = base.map(lambda n, x: x.transpose(-1, -2).contiguous().transpose(-1, -2) if n == "S" else x)
    negated = base.map(lambda n, x: torch._neg_view(-x))
    for _ in range(2):
        rows = base.map(lambda n, x: x[:1])
        for call in (base, half, strided, negated, base.to(torch.float64), rows):
            exact = call.to(torch.float64)
            want = outcome(call.rule, exact.run(form="recurrent"))
            q, k, v, *gates = (x[:, 0] for x in (call.q, call.k, call.v, *call.gates.values()))
            named = dict(zip(call.gates, gates, strict=True))
            for overwrite in (False, True):
                state = call.state.clone(memory_format=torch.contiguous_format) if overwrite else call.state
                o, after = ops.step(call.rule, q, k, v, state=state, overwrite_state=overwrite, **named)
                assert_close(outcome(call.rule, (o[:, None], after)), want, call.v.dtype)
                assert (after is state) == overwrite
