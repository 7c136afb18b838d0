"""Equalities between rules, and what a single rule must do, each a theorem of its own."""

import torch

from innerloop import ops
from innerloop.testing import assert_close, draw_call, error

DOUBLE = torch.float64


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
