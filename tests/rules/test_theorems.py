"""What must hold between rules, and of one rule alone, whatever the numbers."""

import pytest
import torch

from innerloop import ops, rules
from innerloop import rule as registry
from innerloop.testing import TOLERANCES, assert_close, draw_call, error, forms, gradients, outcome

DOUBLE = torch.float64
NAMES = [module.RULE.name for module in rules.ALL]
CHUNKED = [name for name in NAMES if registry.get(name).has_chunk]


def qkv(**sizes):
    call = draw_call("linear_attention", **sizes)
    return call.q, call.k, call.v


def test_gated_delta_rule_without_fading_is_the_delta_rule():
    call = draw_call("delta_rule", state=True, edges=True)
    want, _ = call.run()
    beta = call.gates["beta"]
    got, _ = ops.gated_delta_rule(call.q, call.k, call.v, g=torch.zeros_like(beta), beta=beta, initial_state=call.state)
    assert_close(got, want, DOUBLE)


def test_gated_delta_rule_that_never_writes_only_fades():
    call = draw_call("gated_delta_rule", state=True)
    g = call.gates["g"]
    _, state = ops.gated_delta_rule(
        call.q, call.k, call.v, g=g, beta=torch.zeros_like(g), initial_state=call.state, output_final_state=True
    )
    assert_close(state, g.sum(1).exp()[..., None, None] * call.state, DOUBLE)


def test_mamba2_with_one_decay_a_head_is_retention():
    q, k, v = qkv()
    g = -torch.rand(4, dtype=DOUBLE)
    want, _ = ops.mamba2(q, k, v, g=g.expand(2, 37, 4))
    assert_close(ops.retention(q, k, v, g=g)[0], want, DOUBLE)


def test_retention_defaults_to_the_published_decays():
    q, k, v = qkv()
    decay = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(4)], dtype=DOUBLE)
    assert_close(ops.retention(q, k, v)[0], ops.retention(q, k, v, g=decay.log())[0], DOUBLE)


def test_mamba2_without_decay_is_linear_attention():
    q, k, v = qkv()
    none = torch.zeros(2, 37, 4, dtype=DOUBLE)
    assert_close(ops.mamba2(q, k, v, g=none)[0], ops.linear_attention(q, k, v)[0], DOUBLE)


def test_momentum_delta_rule_without_momentum_and_forgetting_is_the_delta_rule():
    call = draw_call("delta_rule")
    beta, zero = call.gates["beta"], torch.zeros_like(call.gates["beta"])
    want, _ = call.run(scale=1.0)
    got, _ = ops.momentum_delta_rule(call.q, call.k, call.v, theta=beta, eta=zero, alpha=zero)
    assert_close(got, want, DOUBLE)


def test_momentum_delta_rule_without_momentum_is_not_the_gated_delta_rule():
    call = draw_call("gated_delta_rule", state=True)
    gates = {"theta": call.gates["beta"], "eta": torch.zeros_like(call.gates["g"]), "alpha": 1 - call.gates["g"].exp()}
    state = ops.MomentumState(call.state, torch.zeros_like(call.state))
    got, _ = ops.momentum_delta_rule(call.q, call.k, call.v, initial_state=state, **gates)
    assert error(got, call.run(scale=1.0)[0]) > 1e-3


def test_momentum_takes_gradient_momentum_and_forgetting_in_the_papers_order():
    one = torch.ones(1, 3, 1, 1, dtype=DOUBLE)
    gate = one[..., 0]
    for form in ("recurrent", "chunk"):
        o, _ = ops.momentum_delta_rule(one, one, one, theta=0.1 * gate, eta=0.5 * gate, alpha=0.2 * gate, form=form)
        assert_close(o.flatten(), torch.tensor([0.1, 0.22, 0.324], dtype=DOUBLE), DOUBLE)


def test_longhorn_at_infinite_beta_overwrites():
    call = draw_call("longhorn")
    beta = torch.full_like(call.gates["beta"], torch.inf)
    o, _ = ops.longhorn(call.k, call.k, call.v, beta=beta, scale=1.0)
    assert_close(o, call.v, DOUBLE)


def test_longhorn_is_the_delta_rule_at_its_own_rate():
    call = draw_call("longhorn")
    beta = call.gates["beta"]
    rate = beta / (1 + beta * call.k.square().sum(-1).repeat_interleave(2, -1))
    assert_close(call.run()[0], ops.delta_rule(call.q, call.k, call.v, beta=rate)[0], DOUBLE)


def test_longhorn_at_infinite_beta_has_no_slope_at_a_zero_key():
    call = draw_call("longhorn", T=5)
    call.k[:, 2] = 0
    call.gates["beta"][:] = torch.inf
    call = call.tracked()
    for form in ("recurrent", "chunk"):
        slopes = torch.autograd.grad(call.run(form=form)[0].square().sum(), (call.k, call.gates["beta"]))
        assert not slopes[0][:, 2].any()
        assert not slopes[1][:, 2].any()
        assert slopes[0][:, 1].any()


def test_longhorn_steps_less_for_a_longer_key():
    call = draw_call("longhorn", T=40)
    call.k *= torch.linspace(0.1, 3, 40, dtype=DOUBLE)[:, None, None]
    for beta in (0.3, 1.0, 20.0):
        call.gates["beta"][:] = beta
        rate = beta / (1 + beta * call.k.square().sum(-1).repeat_interleave(2, -1))
        want, _ = ops.delta_rule(call.q, call.k, call.v, beta=rate, form="recurrent")
        for form in ("recurrent", "chunk"):
            assert_close(call.run(form=form)[0], want, DOUBLE)


def test_recursive_least_squares_solves_the_ridge_problem_of_every_prefix():
    q, k, v = qkv(G=2)
    o, _ = ops.recursive_least_squares(q, k, v, ridge=0.3)
    for t in (0, 4, 36):
        keys, values = (x[:, : t + 1].transpose(1, 2) for x in (k, v))
        fit = torch.linalg.solve(keys.mT @ keys + 0.3 * torch.eye(5, dtype=DOUBLE), keys.mT @ values)
        assert_close(o[:, t], torch.einsum("bhkv,bhk->bhv", fit, q[:, t]), DOUBLE)


def test_recursive_least_squares_resets_at_minus_infinity():
    q, k, v = qkv(G=2)
    g = torch.zeros(2, 37, 2, dtype=DOUBLE)
    g[:, 20] = -torch.inf
    o, _ = ops.recursive_least_squares(q, k, v, g=g)
    assert_close(o[:, 20:], ops.recursive_least_squares(q[:, 20:], k[:, 20:], v[:, 20:])[0], DOUBLE)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_recursive_least_squares_without_a_decay_has_one_of_zero(form):
    call = draw_call("recursive_least_squares", B=1, T=19, state=True)
    call.gates["g"][:] = 0
    bounds = torch.tensor([0, 4, 19])
    for options in ({}, {"cu_seqlens": bounds}):
        call.state = draw_call("recursive_least_squares", B=1 + bool(options), state=True).state
        want = call.tracked()
        truth = want.run(form=form, **options)
        got = want.tracked()
        got.gates = {}
        result = got.run(form=form, **options)
        assert_close(outcome(got.rule, result), outcome(got.rule, truth), DOUBLE)
        slopes = gradients(want, truth)
        del slopes["g"]
        assert_close(gradients(got, result), slopes, DOUBLE, "gradients")


def test_normalized_linear_attention_of_ones_is_one():
    call = draw_call("normalized_linear_attention")
    o, _ = ops.normalized_linear_attention(call.q, call.k, torch.ones_like(call.v))
    assert_close(o, torch.ones_like(call.v), DOUBLE)


def test_normalized_linear_attention_reads_zero_where_the_weights_sum_to_zero():
    q, k, v = (x.requires_grad_() for x in qkv(T=3))
    none = torch.zeros_like(q)
    for form in ("recurrent", "chunk"):
        o, _ = ops.normalized_linear_attention(none, k, v, form=form)
        assert torch.equal(o, torch.zeros_like(v))
        o, _ = ops.normalized_linear_attention(q, k * 0, v, form=form)
        slopes = torch.autograd.grad(o.sum(), (q, k, v))
        assert all(x.isfinite().all() for x in slopes)


def test_normalized_linear_attention_reads_zero_where_weights_of_two_signs_cancel():
    q = torch.tensor([1.0, -1.0], dtype=DOUBLE).expand(1, 2, 1, 2)
    k, v = torch.eye(2, dtype=DOUBLE)[None, :, None], torch.tensor([[3.0], [1.0]], dtype=DOUBLE)[None, :, None]
    for form in ("recurrent", "chunk"):
        o, _ = ops.normalized_linear_attention(q, k, v, form=form)
        assert o.flatten().tolist() == [3.0, 0.0]


def test_softmax_attention_is_the_mean_under_the_softmax():
    call = draw_call("softmax_attention")
    scores = torch.einsum("bthk,bshk->bhts", call.q, call.k.repeat_interleave(2, 2)) * 0.3
    weights = scores.masked_fill(torch.ones(37, 37, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    want = torch.einsum("bhts,bshv->bthv", weights, call.v.repeat_interleave(2, 2))
    assert_close(call.run(scale=0.3)[0], want, DOUBLE)


@pytest.mark.parametrize("rule", ["delta_rule", "gated_delta_rule"])
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
def test_no_length_depends_on_the_chunk(size):
    for length in (*range(1, 18), 63, 65, 127, 334):
        call = draw_call("gated_delta_rule", B=1, H=1, G=1, T=length, state=True)
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
