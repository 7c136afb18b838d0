"""Lengths, strides, precisions and gates at which such layers have gone wrong, for every rule that they concern."""

import pytest
import torch

from innerloop import ops, rules
from innerloop import rule as registry
from innerloop.testing import TOLERANCES, assert_close, draw_call, error, forms, gradients, outcome

DOUBLE = torch.float64
NAMES = [module.RULE.name for module in rules.ALL]
CHUNKED = [name for name in NAMES if registry.get(name).has_chunk]


@pytest.mark.parametrize("rule", ["delta_rule", "gated_delta_rule", "kda"])
@pytest.mark.parametrize("beta", [1.9, 2.0])
def test_a_reflected_key_stays_within_its_bar(rule, beta):
    call = draw_call(rule, T=512, K=64, V=16, G=2)
    call.k[:] = call.k[:, :1].clone()
    call.gates["beta"][:] = beta
    if "g" in call.gates:
        call.gates["g"][:] = 0
    want, _ = call.run(form="recurrent")
    for size in (16, 64, 512):
        got, _ = call.to(torch.float32).run(form="chunk", chunk_size=size)
        assert_close(got, want, torch.float32, "reflections")


def test_a_reflection_keeps_the_norm_and_flips_the_sign_over_4096_tokens():
    axis = torch.zeros(1, 4096, 1, 2)
    axis[:, ::2, :, 0] = 1
    axis[:, 1::2, :, 1] = 1
    beta = torch.full((1, 4096, 1), 2.0)
    state = torch.eye(2).expand(1, 1, 2, 2)
    for form in ("recurrent", "chunk"):
        _, after = ops.delta_rule(
            axis, axis, torch.zeros(1, 4096, 1, 2), beta=beta, initial_state=state, output_final_state=True, form=form
        )
        assert torch.equal(after, state)  # 2,048 flips along each axis: an even number
        _, odd = ops.delta_rule(
            axis[:, :1],
            axis[:, :1],
            torch.zeros(1, 1, 1, 2),
            beta=beta[:, :1],
            initial_state=after,
            output_final_state=True,
            form=form,
        )
        assert torch.equal(odd, torch.diag(torch.tensor([-1.0, 1.0]))[None, None])


def test_identical_keys_follow_the_scalar_recursion():
    call = draw_call("delta_rule", T=64, G=2)
    call.k[:] = call.k[:, :1].clone()
    for beta in (0.5, 1.0, 2.0):
        call.gates["beta"][:] = beta
        read, want = torch.zeros_like(call.v[:, 0]), []
        for value in call.v.unbind(1):
            read = (1 - beta) * read + beta * value
            want.append(read)
        o, _ = ops.delta_rule(call.k, call.k, call.v, beta=call.gates["beta"], scale=1.0)
        assert_close(o, torch.stack(want, 1), DOUBLE)


@pytest.mark.parametrize("rule", ["mamba2", "gated_delta_rule"])
def test_a_tiny_decay_anywhere_is_exact(rule):
    for places in (slice(None), slice(31, 32)):
        for decay in (1e-12, 0.0):
            call = draw_call(rule, T=64, K=8, V=8)
            call.gates["g"][:, places] = torch.tensor(decay, dtype=DOUBLE).log()
            want, _ = call.run(form="recurrent")
            for size in (32, 64):
                got, _ = call.to(torch.float32).run(form="chunk", chunk_size=size)
                assert_close(got, want, torch.float32)


def test_the_decay_of_a_thousand_small_steps_survives_half_precision():
    call = draw_call("gated_delta_rule", T=4096, B=1, H=1, G=1, K=8, V=8)
    call.gates["g"][:] = -1e-3
    want, _ = call.run(form="chunk")
    half = call.to(torch.bfloat16)
    half.gates["g"] = half.gates["g"].float()
    half.gates["g"][:] = -1e-3
    got, state = half.run(form="chunk")
    assert state.dtype == torch.float32
    assert error(got, want) < TOLERANCES["values"][torch.bfloat16]


def test_unit_keys_inside_are_unit_in_half_precision():
    for size in (1e-3, 1.0, 1e3):
        k = (torch.randn(1, 1, 1, 128, dtype=DOUBLE) * size).to(torch.bfloat16)
        state = torch.eye(128).expand(1, 1, 128, 128)
        o, _ = ops.linear_attention(
            k, k, torch.zeros_like(k), initial_state=state, use_qk_l2norm_in_kernel=True, scale=1.0
        )
        want = (k.double().square().sum() / (k.double().square().sum() + 1e-6)).sqrt()
        assert abs(o.double().norm() - want) < 2**-8


@pytest.mark.parametrize("name", CHUNKED)
def test_five_axes_of_prime_length_stay_apart(name):
    call = draw_call(name, B=2, T=7, H=3, G=3, K=5, V=11, state=True)
    assert_close(call.run(form="chunk", chunk_size=4)[0], call.run(form="recurrent")[0], DOUBLE)


@pytest.mark.parametrize("name", CHUNKED)
def test_a_call_may_be_shorter_than_any_chunk(name):
    for length in range(1, 18):
        call = draw_call(name, B=1, T=length, H=1, G=1, K=3, V=2, state=True).tracked()
        got, want = (call.run(form=form) for form in ("chunk", "recurrent"))
        assert_close(outcome(call.rule, got), outcome(call.rule, want), DOUBLE, what=f"T={length}")
        assert_close(gradients(call, got), gradients(call, want), DOUBLE, "gradients", f"T={length}")


# Tokens of zeros leave a memory alone, but momentum moves on, retention fades by itself, and attention keeps them.
NEUTRAL = [name for name in NAMES if name not in ("momentum_delta_rule", "retention", "softmax_attention")]


@pytest.mark.parametrize("name", NEUTRAL)
def test_tokens_of_zeros_leave_the_memory_alone(name):
    call = draw_call(name, T=64, state=True)
    timed = {"q", "k", "v", *(gate.name for gate in call.rule.gates if "T" in gate.axes)}
    for key in timed:
        call.tensors()[key][:, 12:] = 0
    short = call.tokens(0, 12)
    short.state = call.state
    _, want = short.run(form="recurrent")
    for form in forms(call.rule):
        _, got = call.run(**form)
        for x, y in zip(call.rule.state_tensors(got), call.rule.state_tensors(want), strict=True):
            assert error(x, y) < 1e-14, form


# Moments are made symmetric on entry, which is no change but may be one of a bit.
WRITES_BY_BETA = [
    name
    for name in NEUTRAL
    if "beta" in {x.name for x in registry.get(name).gates} and "H_kk" not in registry.get(name).states
]


@pytest.mark.parametrize("name", WRITES_BY_BETA)
def test_a_beta_of_zero_keeps_the_memory_to_the_bit(name):
    call = draw_call(name, T=21, state=True, dtype=torch.float32)
    for key, x in call.gates.items():
        if key in ("g", "beta"):
            x[:] = 0
    for form in forms(call.rule):
        _, got = call.run(**form)
        for x, y in zip(call.rule.state_tensors(got), call.rule.state_tensors(call.state), strict=True):
            assert torch.equal(x, y), form


@pytest.mark.parametrize("size", [1, 3, 16, 64, 83, 128])
@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda", "rwkv7"])
def test_no_length_depends_on_the_chunk(rule, size):
    for length in (*range(1, 18), 63, 65, 127, 334):
        call = draw_call(rule, B=1, H=1, G=1, T=length, state=True)
        assert_close(call.run(form="chunk", chunk_size=size)[0], call.run(form="recurrent")[0], DOUBLE)


def test_an_offset_beyond_two_gigabytes_is_read_right():
    lazy = torch.empty(2**31 + 64, dtype=torch.bfloat16)  # pages are touched only where written
    view = lazy.as_strided((1, 3, 1, 4), (1, 2**30, 4, 1))
    k = torch.randn(1, 3, 1, 4).bfloat16()
    view.copy_(k)
    for form in ("recurrent", "chunk"):
        far, _ = ops.linear_attention(view, view, view, form=form)
        near, _ = ops.linear_attention(k, k, k, form=form)
        assert torch.equal(far, near)
