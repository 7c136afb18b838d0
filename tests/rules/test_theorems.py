"""What must hold between rules, and of one rule alone, whatever the numbers."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from innerloop import ops, rules
from innerloop import rule as registry
from innerloop.algebra import diagonal
from innerloop.algebra.conjugate_gradients import conjugate_gradients
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


def test_gla_whose_channels_fade_alike_is_mamba2():
    call = draw_call("mamba2", state=True, edges=True)
    g = call.gates["g"][..., None].expand(2, 37, 4, 5)
    assert_close(ops.gla(call.q, call.k, call.v, g=g, initial_state=call.state)[0], call.run()[0], DOUBLE)


def test_gla_without_decay_is_linear_attention():
    q, k, v = qkv()
    none = torch.zeros(2, 37, 4, 5, dtype=DOUBLE)
    assert_close(ops.gla(q, k, v, g=none)[0], ops.linear_attention(q, k, v)[0], DOUBLE)


def test_kda_whose_channels_fade_alike_is_the_gated_delta_rule():
    call = draw_call("gated_delta_rule", state=True, edges=True)
    g = call.gates["g"][..., None].expand(2, 37, 4, 5)
    got, _ = ops.kda(call.q, call.k, call.v, g=g, beta=call.gates["beta"], initial_state=call.state)
    assert_close(got, call.run()[0], DOUBLE)


def test_kda_that_never_writes_only_fades():
    call = draw_call("kda", state=True)
    call.gates["beta"][:] = 0
    assert_close(call.run()[1], call.gates["g"].sum(1).exp()[..., None] * call.state, DOUBLE)


def test_gdn2_with_one_gate_for_all_is_kda():
    call = draw_call("kda", state=True, edges=True)
    beta = call.gates["beta"][..., None]
    gates = {"g": call.gates["g"], "b": beta.expand(2, 37, 4, 5), "w": beta.expand(2, 37, 4, 3)}
    got, _ = ops.gdn2(call.q, call.k, call.v, initial_state=call.state, **gates)
    assert_close(got, call.run()[0], DOUBLE)


def test_rwkv7_whose_roles_are_tied_is_the_delta_rule():
    call = draw_call("delta_rule", G=2, state=True, edges=True)  # beta scales the key, so each value head needs its own
    beta = call.gates["beta"][..., None].expand(2, 37, 2, 5)
    gates = {"g": torch.zeros_like(beta), "a": beta, "kappa": call.k}
    got, _ = ops.rwkv7(call.q, beta * call.k, call.v, initial_state=call.state, **gates)
    assert_close(got, call.run(scale=1.0)[0], DOUBLE)


def test_rwkv7_that_never_erases_is_gla():
    call = draw_call("rwkv7", state=True, edges=True)
    call.gates["a"][:] = 0
    want, _ = ops.gla(call.q, call.k, call.v, g=call.gates["g"], initial_state=call.state, scale=1.0)
    assert_close(call.run()[0], want, DOUBLE)


def test_rwkv7_erases_from_the_memory_before_it_fades():
    call = draw_call("rwkv7", T=1, state=True)
    call.gates["g"][:] = -torch.inf
    kappa = call.gates["kappa"][:, 0].repeat_interleave(2, 1)
    answer = torch.einsum("bgkv,bgk->bgv", call.state, kappa)
    erased = (call.gates["a"][:, 0] * kappa)[..., None] * answer[..., None, :]
    write = call.k[:, 0].repeat_interleave(2, 1)[..., None] * call.v[:, 0, :, None, :]
    for form in ("recurrent", "chunk"):
        assert_close(call.run(form=form)[1], write - erased, DOUBLE)


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


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_delta_product_takes_gradient_steps_on_its_pairs_in_order(form):
    call = draw_call("delta_product", B=1, T=5, H=1, G=1, state=True)
    state, outputs = call.state, []
    for t in range(5):
        state = call.gates["g"][:, t, :, None, None].exp() * state
        for i in range(2):
            leaf = state.detach().requires_grad_()
            error = torch.einsum("bgkv,bgk->bgv", leaf, call.k[:, t, i]) - call.v[:, t, i]
            (slope,) = torch.autograd.grad(0.5 * error.square().sum(), leaf)
            state = state - call.gates["beta"][:, t, i, :, None, None] * slope
        outputs.append(torch.einsum("bgkv,bgk->bgv", state, call.q[:, t]))
    o, after = call.run(form=form, scale=1.0)
    assert_close(o, torch.stack(outputs, 1), DOUBLE)
    assert_close(after, state, DOUBLE)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_delta_product_of_one_step_is_the_gated_delta_rule(form):
    call = draw_call("gated_delta_rule", state=True, edges=True)
    want = outcome(call.rule, call.run())
    once = {"k": call.k[:, :, None], "v": call.v[:, :, None], "beta": call.gates["beta"][:, :, None]}
    options = {"initial_state": call.state, "output_final_state": True, "form": form}
    assert_close(outcome(call.rule, ops.delta_product(call.q, **once, g=call.gates["g"], **options)), want, DOUBLE)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
@pytest.mark.parametrize("n", [2, 3])
def test_delta_product_of_n_steps_is_the_delta_rule_over_n_times_as_many_tokens(form, n):
    call = draw_call("delta_rule", T=12 * n, state=True, edges=True).tracked()
    truth = call.run()
    want = {"o": truth[0][:, n - 1 :: n], "S": truth[1]}
    k, v, beta = (x.unflatten(1, (12, n)) for x in (call.k, call.v, call.gates["beta"]))
    got = ops.delta_product(
        call.q[:, n - 1 :: n], k, v, beta=beta, initial_state=call.state, output_final_state=True, form=form
    )
    assert_close(outcome(call.rule, got), want, DOUBLE)
    assert_close(gradients(call, got), gradients(call, (want["o"], truth[1])), DOUBLE, "gradients")


def test_delta_product_fades_once_a_token_and_counts_packed_tokens_not_steps():
    call = draw_call("delta_product", B=1, T=9)
    k, v = call.k.flatten(1, 2), call.v.flatten(1, 2)
    beta, g = call.gates["beta"].flatten(1, 2), call.gates["g"].repeat_interleave(2, 1)
    g[:, 1::2] = 0
    whole, state = ops.gated_delta_rule(
        call.q.repeat_interleave(2, 1), k, v, g=g, beta=beta, cu_seqlens=torch.tensor([0, 8, 18]),
        output_final_state=True,
    )  # fmt: skip
    for form in ("recurrent", "chunk"):
        o, after = call.run(form=form, cu_seqlens=torch.tensor([0, 4, 9]))
        assert_close(o, whole[:, 1::2], DOUBLE)
        assert_close(after, state, DOUBLE)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_delta_product_without_a_decay_has_one_of_zero(form):
    call = draw_call("delta_product", state=True)
    call.gates["g"][:] = 0
    want = outcome(call.rule, call.run(form=form))
    del call.gates["g"]
    assert_close(outcome(call.rule, call.run(form=form)), want, DOUBLE)
    packed = draw_call("delta_product", B=1, T=9)
    packed.gates["g"][:] = 0
    want = outcome(packed.rule, packed.run(form=form, cu_seqlens=torch.tensor([0, 4, 9])))
    del packed.gates["g"]
    assert_close(outcome(packed.rule, packed.run(form=form, cu_seqlens=torch.tensor([0, 4, 9]))), want, DOUBLE)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_diagonal_longhorn_keeps_the_diagonal_of_the_proximal_solution(form):
    call = draw_call("longhorn_diagonal", B=1, T=5, H=1, G=1, K=3, V=2, state=True)
    channels = call.state[0, 0].T.clone()  # [V, K]: a problem of its own for each channel of the value
    outputs = []
    for q, k, v, beta in zip(*(x[0, :, 0] for x in (call.q, call.k, call.v, call.gates["beta"])), strict=True):
        for c in range(2):

            def solve(before, k=k, v=v[c], beta=beta[c]):
                def loss(s):
                    return 0.5 * (s - before).square().sum() + 0.5 * beta * (s @ k - v).square()

                slope, curvature = torch.func.grad(loss)(before), torch.func.jacrev(torch.func.grad(loss))(before)
                return before - torch.linalg.solve(curvature, slope)

            transition = torch.func.jacrev(solve)(channels[c])
            channels[c] = transition.diagonal() * channels[c] + solve(torch.zeros(3, dtype=DOUBLE))
        outputs.append(channels @ q)
    o, state = call.run(form=form, scale=1.0)
    assert_close(o[0, :, 0], torch.stack(outputs), DOUBLE)
    assert_close(state[0, 0].T, channels, DOUBLE)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_diagonal_longhorn_is_longhorn_where_keys_have_one_channel(form):
    call = draw_call("longhorn", K=1, state=True)
    call.k *= torch.linspace(0.1, 3, 37, dtype=DOUBLE)[:, None, None]
    want = outcome(call.rule, call.run())
    wide = call.gates["beta"][..., None].expand_as(call.v)
    options = {"initial_state": call.state, "output_final_state": True, "form": form}
    assert_close(outcome(call.rule, ops.longhorn_diagonal(call.q, call.k, call.v, beta=wide, **options)), want, DOUBLE)


def test_diagonal_longhorn_that_never_writes_keeps_all():
    call = draw_call("longhorn_diagonal", state=True)
    call.gates["beta"][:] = 0
    for form in ("recurrent", "chunk"):
        assert torch.equal(call.run(form=form)[1], call.state)


def test_diagonal_longhorn_overwrites_an_axis_at_the_largest_beta():
    largest = torch.finfo(torch.float32).max
    k = torch.eye(3).repeat(4, 1)[None, :, None]  # every axis four times
    v = torch.randn(1, 12, 1, 5, generator=torch.Generator().manual_seed(0))
    for form in ("recurrent", "chunk"):
        o, state = ops.longhorn_diagonal(
            k, 2 * k, v, beta=torch.full_like(v, largest), scale=1.0, output_final_state=True, form=form
        )
        assert_close(o, v / 2, torch.float32)
        assert_close(state[0, 0], v[0, 9:, 0] / 2, torch.float32)
    with pytest.raises(ValueError, match=r"beta must lie in .* got a maximum of inf"):
        ops.longhorn_diagonal(k, k, v, beta=torch.full_like(v, torch.inf))


@pytest.mark.parametrize("together", [1, 250, 1000])
def test_diagonal_longhorn_does_not_depend_on_how_many_chunks_run_together(together, monkeypatch):
    call = draw_call("longhorn_diagonal", state=True).tracked()
    truth = call.run(form="recurrent")
    want, slopes = outcome(call.rule, truth), gradients(call, truth)
    monkeypatch.setattr(diagonal, "TOGETHER", together)  # one memory is 2 x 4 x 5 x 3
    for size in (1, 4, 16):
        got = call.run(form="chunk", chunk_size=size)
        assert_close(outcome(call.rule, got), want, DOUBLE)
        assert_close(gradients(call, got), slopes, DOUBLE, "gradients")


def test_diagonal_longhorn_has_second_derivatives_over_several_parts(monkeypatch):
    monkeypatch.setattr(diagonal, "TOGETHER", 48)
    seconds = []
    for form in ({"form": "recurrent"}, {"form": "chunk", "chunk_size": 2}):
        call = draw_call("longhorn_diagonal", B=1, T=11, H=1, G=2, K=3, V=4, state=True).tracked()
        first = torch.autograd.grad(call.run(**form)[0].square().sum(), (call.q, call.k), create_graph=True)
        total = sum(x.square().sum() for x in first)
        seconds.append(
            dict(zip(call.tensors(), torch.autograd.grad(total, list(call.tensors().values())), strict=True))
        )
    assert_close(seconds[1], seconds[0], DOUBLE, "gradients")


def mesa_moments(call, t):
    """Return ``H_kk + diag lamb`` and ``H_kv`` of a mesa call after token t, by a sum over all pairs."""
    fade = call.gates["g"][:, 1 : t + 1].flip(1).cumsum(1).flip(1).exp()  # [B, t, G]: after each pair but the last
    weight = call.gates["beta"][:, : t + 1] * torch.cat((fade, torch.ones_like(fade[:, :1])), 1)[:, : t + 1]
    keys = call.k[:, : t + 1].repeat_interleave(2, 2)
    covariance = torch.einsum("bsg,bsgk,bsgl->bgkl", weight, keys, keys)
    cross = torch.einsum("bsg,bsgk,bsgv->bgkv", weight, keys, call.v[:, : t + 1])
    return covariance + call.gates["lamb"].diag_embed(), cross


@pytest.mark.parametrize("iterations", [5, 10])
@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_mesa_solves_the_weighted_ridge_problem_of_every_prefix(form, iterations):
    call = draw_call("mesa", T=19)  # K = 5
    o, _ = call.run(form=form, chunk_size=4, iterations=iterations)
    for t in (1, 7, 18):
        matrix, cross = mesa_moments(call, t)
        fit = torch.linalg.solve(matrix, cross)
        assert_close(o[:, t], torch.einsum("bgkv,bgk->bgv", fit, call.q[:, t].repeat_interleave(2, 1)), DOUBLE)


def test_mesa_with_one_ridge_and_no_decay_is_recursive_least_squares_and_the_batch_ridge():
    q, k, v = (x.requires_grad_() for x in qkv(G=2))
    want, _ = ops.recursive_least_squares(q, k, v, ridge=0.3)
    slopes = torch.autograd.grad(want.square().sum(), (q, k, v))
    for form in ("recurrent", "chunk"):
        o, _ = ops.mesa(q, k, v, lamb=torch.full((2, 5), 0.3, dtype=DOUBLE), iterations=10, form=form)
        assert_close(o, want, DOUBLE)
        for got, slope in zip(torch.autograd.grad(o.square().sum(), (q, k, v)), slopes, strict=True):
            assert_close(got, slope, DOUBLE, "gradients")
    keys, values = (x.transpose(1, 2) for x in (k, v))
    fit = torch.linalg.solve(keys.mT @ keys + 0.3 * torch.eye(5, dtype=DOUBLE), keys.mT @ values)
    assert_close(want[:, -1], torch.einsum("bhkv,bhk->bhv", fit, q[:, -1]), DOUBLE)


def test_mesa_that_stops_early_is_the_same_in_every_form_and_no_solution():
    call = draw_call("mesa", T=23, K=16, state=True).tracked()
    exact, _ = call.run()
    for steps in (1, 3):
        truth = call.run(form="recurrent", iterations=steps)
        want, slopes = outcome(call.rule, truth), gradients(call, truth)
        assert error(want["o"], exact) > 1e-3
        for size in (1, 4, 16, 64):
            got = call.run(form="chunk", chunk_size=size, iterations=steps)
            assert_close(outcome(call.rule, got), want, DOUBLE)
            assert_close(gradients(call, got), slopes, DOUBLE, "gradients")
        state = call.state
        for t in range(23):
            gates = {name: x if name == "lamb" else x[:, t] for name, x in call.gates.items()}
            o, state = ops.step(
                "mesa", call.q[:, t], call.k[:, t], call.v[:, t], state=state, iterations=steps, **gates
            )
            assert_close(o, want["o"][:, t], DOUBLE)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the framework's own
@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_mesa_that_stops_early_stops_early_under_transforms_too(form):
    call = draw_call("mesa", T=9, K=16, state=True)
    want, _ = call.run(form=form, iterations=2)

    def run(v):
        return call.map(lambda name, x: v if name == "v" else x).run(form=form, iterations=2)[0]

    assert_close(torch.func.vmap(run)(call.v[None])[0], want, DOUBLE)
    assert_close(torch.func.jvp(run, (call.v,), (call.v,))[0], want, DOUBLE)
    assert_close(torch.func.vjp(run, call.v)[0], want, DOUBLE)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_mesas_gradient_solves_again_instead_of_going_back_through_the_steps(form):
    call = draw_call("mesa", T=9, K=16, G=2, H=1)
    q = call.q.clone().requires_grad_()
    weight = torch.randn(call.v.shape, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    o, _ = ops.mesa(q, call.k, call.v, **call.gates, iterations=2, form=form)
    (slope,) = torch.autograd.grad((o * weight).sum(), q)
    matrix, cross = mesa_moments(call, 8)
    right = torch.einsum("bgkv,bgv->bgk", cross, weight[:, 8])
    solution = conjugate_gradients(
        lambda x: torch.einsum("bgkl,bgl->bgk", matrix, x),
        right,
        iterations=2,
        diagonal=call.gates["lamb"],
        start=right / matrix.diagonal(dim1=-2, dim2=-1),
    )
    assert_close(slope[:, 8, 0], solution.sum(1), DOUBLE, "gradients")


def test_mesa_needs_few_steps_where_keys_point_few_ways():
    call = draw_call("mesa", B=1, T=256, H=1, G=1, K=32)
    call.k[:] = call.k[:, :3].repeat(1, 86, 1, 1)[:, :256]
    call.gates["g"][:] = 0
    want, _ = call.run(form="chunk", iterations=64)
    for form in ("recurrent", "chunk"):  # three directions beside the ridge's
        assert_close(call.run(form=form, iterations=6)[0], want, DOUBLE)


@pytest.mark.parametrize("left_out", [("g",), ("beta",), ("g", "beta")])
@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_mesa_without_a_gate_has_no_decay_and_pairs_of_weight_one(form, left_out):
    bounds = torch.tensor([0, 4, 19])
    for options in ({}, {"cu_seqlens": bounds}):
        call = draw_call("mesa", B=1, T=19)
        call.state = draw_call("mesa", B=1 + bool(options), state=True).state
        for gate in left_out:
            call.gates[gate][:] = 0.0 if gate == "g" else 1.0
        call = call.tracked()
        truth = call.run(form=form, **options)
        bare = call.tracked()
        bare.gates = {name: x for name, x in bare.gates.items() if name not in left_out}
        result = bare.run(form=form, **options)
        assert_close(outcome(call.rule, result), outcome(call.rule, truth), DOUBLE)
        slopes = {name: x for name, x in gradients(call, truth).items() if name not in left_out}
        assert_close(gradients(bare, result), slopes, DOUBLE, "gradients")


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_mesa_makes_a_given_covariance_symmetric(form):
    call = draw_call("mesa", T=5, state=True)
    whole = torch.randn(call.state.H_kk.shape, generator=torch.Generator().manual_seed(2), dtype=DOUBLE)
    want = outcome(call.rule, call.run(form=form))
    call.state = call.state._replace(H_kk=call.state.H_kk + whole - whole.mT)
    call = call.tracked()
    result = call.run(form=form)
    assert_close(outcome(call.rule, result), want, DOUBLE)
    slope = gradients(call, result)["H_kk"]
    assert_close(slope, slope.mT, DOUBLE, "gradients")


def test_mesas_ridge_belongs_to_its_head_and_channel():
    call = draw_call("mesa", T=5)
    o, _ = call.run()
    call.gates["lamb"][2, 3] *= 1.5
    other, _ = call.run()
    changed = (o != other).any(-1).any(1).any(0)
    assert changed.tolist() == [False, False, True, False]
    for wrong, match in (
        (call.gates["lamb"][:, 0], r"lamb must have shape \[G, K\]"),
        (call.gates["lamb"].T, r"lamb must have shape \[G, K\] with G=4, K=5"),
        (0 * call.gates["lamb"], "lamb must lie in .* got a minimum of 0"),
    ):
        with pytest.raises(ValueError, match=match):
            ops.mesa(call.q, call.k, call.v, lamb=wrong)
    for wrong, match in ((0, "finite and above 0"), (2.5, "a whole number; got 2.5")):
        with pytest.raises(ValueError, match=f"iterations must be {match}"):
            ops.mesa(call.q, call.k, call.v, lamb=call.gates["lamb"], iterations=wrong)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        found = result if isinstance(result, (tuple, list)) else (result,)
        self.numel = max([self.numel, *(x.numel() for x in found if isinstance(x, torch.Tensor))])
        return result


def test_mesa_forms_no_covariance_of_a_token():
    call = draw_call("mesa", B=1, T=128, H=1, G=1, K=32, V=8)
    operator = rules.mesa.MESA
    gates = call.rule.complete(call.gates, call.v).values()
    rest = (None, None, None, 1.0, False, 16, (4.0,))
    with Largest() as forward:
        operator._forward(call.q, call.k, call.v, *gates, *rest)
    with Largest() as backward:
        needs = [True] * 6 + [False] * 2
        operator._gradients(call.q, call.k, call.v, *gates, *rest, torch.ones_like(call.v), None, None, needs)
    assert max(forward.numel, backward.numel) < 128 * 32 * 32 / 8


def test_momentum_delta_rule_without_momentum_is_the_cell_of_the_hope_document():
    call = draw_call("momentum_delta_rule", B=2, T=9, H=1, G=1, K=5, V=5)
    rate, keep = call.gates["theta"], 1 - call.gates["alpha"]
    memory, outputs = torch.zeros(2, 5, 5, dtype=DOUBLE), []
    for t in range(9):  # the document's line, its memory transposed to ours
        k, target, eta, alpha = call.k[:, t, 0], call.v[:, t, 0], rate[:, t, :, None], keep[:, t, :, None]
        recalled = torch.bmm(memory, k.unsqueeze(-1)).squeeze(-1)
        memory = alpha * memory - eta * torch.bmm((recalled - target).unsqueeze(-1), k.unsqueeze(1))
        outputs.append(torch.bmm(memory, call.q[:, t, 0].unsqueeze(-1)).squeeze(-1))
    call.gates["eta"][:] = 0
    for form in ("recurrent", "chunk"):
        o, state = call.run(form=form)
        assert_close(o[:, :, 0], torch.stack(outputs, 1), DOUBLE)
        assert_close(state.S[:, 0], memory.mT, DOUBLE)
