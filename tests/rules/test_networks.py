"""Memories that are networks against their definitions, written out for one row and head, and what the papers say."""

import math

import pytest
import torch
from torch.nn import functional as F

from innerloop import ops
from innerloop.testing import assert_close, draw_network_call
from innerloop.testing.network_draw import VARIANTS

DOUBLE = torch.float64
ACTIVATIONS = {
    "gelu": lambda z: 0.5 * z * (1 + torch.erf(z / math.sqrt(2))),
    "gelu_tanh": lambda z: 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "silu": lambda z: z / (1 + torch.exp(-z)),
    "relu": lambda z: z.clamp(min=0),
}


def slopes(loss, weights):
    return torch.autograd.grad(loss, weights, create_graph=True)


def network(weights, x, activation, residual):
    h = x
    for i, weight in enumerate(weights):
        h = (h if i == 0 else ACTIVATIONS[activation](h)) @ weight
    return h + x if residual else h


def titans_of_one_head(tokens, weights, *, mini_batch, activation="gelu", residual=False, normalize_step=False):
    """Return the reads and the last (start, weights, momentum) of ``[T, ...]`` tokens."""
    start = memory = weights
    momentum, reads = [torch.zeros_like(w) for w in weights], []
    for t, (q, k, v, theta, eta, alpha) in enumerate(zip(*tokens, strict=True)):
        if t % mini_batch == 0:
            start = memory
        error = network(start, k, activation, residual) - v
        found = slopes((error * error).sum() / 2, start)
        rates = [theta] * len(start)
        if normalize_step:
            inputs = [k]
            for weight in start[:-1]:
                z = inputs[-1] @ weight
                inputs.append(ACTIVATIONS[activation](z))
            for i in range(len(start)):
                bend = inputs[i].norm() ** 2 * math.prod(w.norm() ** 2 for w in start[i + 1 :])
                rates[i] = theta / (1 + theta * bend)
        momentum = [eta * u - rate * g for u, rate, g in zip(momentum, rates, found, strict=True)]
        memory = [(1 - alpha) * w + u for w, u in zip(memory, momentum, strict=True)]
        reads.append(network(memory, q, activation, residual))
    return torch.stack(reads), memory if len(tokens[0]) % mini_batch == 0 else start, memory, momentum


@pytest.mark.parametrize("variant", VARIANTS["titans"])
def test_titans_is_its_definition(variant):
    call = draw_network_call("titans", variant, T=11, B=1, H=1, G=2).tracked()
    settings = dict(call.settings)
    for form in ("recurrent", "chunk"):
        out, state = call.run(form=form)
        named = {name: x for name, x in call.tensors().items() if "state" not in name}
        got = torch.autograd.grad(out.square().sum(), list(named.values()), retain_graph=True)
        total = 0
        for head in range(2):
            tokens = [call.tokens[name][0, :, 0 if name in "qk" else head] for name in call.tokens]
            weights = [w[head] for w in call.shared["weights"]]
            reads, *ends = titans_of_one_head(tokens, weights, **settings)
            assert_close(out[0, :, head], reads, DOUBLE)
            for tensors, wanted in zip(state[:-1], ends, strict=True):
                for x, y in zip(tensors, wanted, strict=True):
                    assert_close(x[0, head], y, DOUBLE)
            total = total + reads.square().sum()
        for name, x, y in zip(named, got, torch.autograd.grad(total, list(named.values())), strict=True):
            assert_close(x, y, DOUBLE, "gradients", name)


def ttt_of_one_head(tokens, weights, gamma, beta, offset, mini_batch):
    """Return the reads and the last (start, sum of gradients) of ``[T, ...]`` tokens."""

    def normed(weights, x):
        z = x @ weights[0] + weights[1]
        if len(weights) == 4:
            z = ACTIVATIONS["gelu_tanh"](z) @ weights[2] + weights[3]
        return F.layer_norm(z, z.shape, gamma, beta, 1e-6)

    start, total, reads = weights, [torch.zeros_like(w) for w in weights], []
    for t, (q, k, v, lr) in enumerate(zip(*tokens, strict=True)):
        i = t % mini_batch + 1
        found = slopes(((normed(start, k) - (v - k)) ** 2).sum() / 2, start)
        total = [x + lr * g for x, g in zip(total, found, strict=True)]
        factor = torch.clamp(1 / i + offset[i - 1], min=0)
        now = [w - factor * x for w, x in zip(start, total, strict=True)]
        reads.append(q + normed(now, q))
        if i == mini_batch:
            start, total = now, [torch.zeros_like(w) for w in weights]
    return torch.stack(reads), start, total


@pytest.mark.parametrize("variant", VARIANTS["ttt"])
def test_ttt_is_its_definition(variant):
    call = draw_network_call("ttt", variant, T=18, B=1, H=1, G=2).tracked()
    for form in ("recurrent", "chunk"):
        out, state = call.run(form=form)
        named = {name: x for name, x in call.tensors().items() if "state" not in name}
        got = torch.autograd.grad(out.square().sum(), list(named.values()), retain_graph=True)
        total = 0
        for head in range(2):
            tokens = [call.tokens[name][0, :, 0 if name in "qk" else head] for name in call.tokens]
            shared = (call.shared[name] for name in ("norm_weight", "norm_bias"))
            reads, *ends = ttt_of_one_head(
                tokens, [w[head] for w in call.shared["weights"]], *(x[head] for x in shared),
                call.shared["position_offset"], call.settings["mini_batch"],
            )  # fmt: skip
            assert_close(out[0, :, head], reads, DOUBLE)
            for tensors, wanted in zip(state[:-1], ends, strict=True):
                for x, y in zip(tensors, wanted, strict=True):
                    assert_close(x[0, head], y, DOUBLE)
            total = total + reads.square().sum()
        for name, x, y in zip(named, got, torch.autograd.grad(total, list(named.values())), strict=True):
            assert_close(x, y, DOUBLE, "gradients", name)


def scalar(values):
    return torch.tensor(values, dtype=DOUBLE).view(1, -1, 1, 1)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_momentum_decay_and_gradient_come_in_the_papers_order(form):
    ones, gates = scalar([1.0] * 3), torch.ones(1, 3, 1, dtype=DOUBLE)
    o, state = ops.titans(
        ones, ones, ones, theta=0.1 * gates, eta=0.5 * gates, alpha=0.2 * gates, mini_batch=1, form=form,
        weights=(torch.zeros(1, 1, 1, dtype=DOUBLE),), output_final_state=True,
    )  # fmt: skip
    assert_close(o.flatten(), torch.tensor([0.1, 0.22, 0.324], dtype=DOUBLE), DOUBLE)
    assert_close(state.momentum[0].flatten(), torch.tensor([0.148], dtype=DOUBLE), DOUBLE)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_every_token_fades_the_first_weights_by_its_own_alpha(form):
    alpha = torch.tensor([0.1, 0.5, 0.2, 0.9], dtype=DOUBLE).view(1, 4, 1)
    zeros = torch.zeros_like(alpha)
    o, _ = ops.titans(
        scalar([1.0] * 4), scalar([0.0] * 4), scalar([0.0] * 4), theta=zeros, eta=zeros, alpha=alpha, mini_batch=4,
        weights=(torch.ones(1, 1, 1, dtype=DOUBLE),), form=form,
    )  # fmt: skip
    assert_close(o.flatten(), torch.tensor([0.9, 0.45, 0.36, 0.036], dtype=DOUBLE), DOUBLE)


def test_titans_of_one_layer_with_mini_batches_of_one_is_the_momentum_delta_rule():
    call = draw_network_call("titans", "linear", T=23)
    q, k, v, *gates = call.tokens.values()
    gates = dict(zip(("theta", "eta", "alpha"), gates, strict=True))
    first = call.shared["weights"][0].expand(2, -1, -1, -1)
    want, state = ops.momentum_delta_rule(
        q, k, v, **gates, initial_state=ops.MomentumState(first, torch.zeros_like(first)), output_final_state=True
    )
    for form in ("recurrent", "chunk"):
        got, after = ops.titans(
            q, k, v, **gates, **call.shared, mini_batch=1, output_final_state=True, form=form
        )
        assert_close(got, want, DOUBLE)
        assert_close(after.weights[0], state.S, DOUBLE)
        assert_close(after.momentum[0], state.U, DOUBLE)


@pytest.mark.parametrize("name", ["ttt", "titans"])
def test_a_mini_batch_that_is_not_full_is_carried_and_finished_later(name):
    call = draw_network_call(name, T=64)
    call.settings["mini_batch"] = 64
    if name == "ttt":
        call.shared["position_offset"] = None
    whole = call.run()[1]
    first = call.between(0, 10)
    state = first.run()[1]
    assert state.position.tolist() == [10, 10]
    assert torch.equal(state.start[0], call.shared["weights"][0].expand(2, -1, -1, -1)), "gradients stay where it began"
    rest = call.between(10, 64)
    rest.state = state
    after = rest.run()[1]
    for x, y in zip(after.start, whole.start, strict=True):
        assert_close(x, y, DOUBLE)
    assert not torch.equal(after.start[0], state.start[0]), "a whole mini-batch moves the memory"


@pytest.mark.parametrize("name", ["ttt", "titans"])
def test_key_heads_are_shared_by_value_heads(name):
    call = draw_network_call(name, T=9).tracked()
    apart = call.map(lambda path, x: x.repeat_interleave(2, -2) if path[-3:-2] in "qk" and "tokens" in path else x)
    assert apart.tokens["q"].shape[2] == 4
    (together, _), (separate, _) = call.run(), apart.run()
    assert torch.equal(together, separate)
    named = [call.tokens["k"], *call.shared["weights"]]
    for x, y in zip(*(torch.autograd.grad(o.square().sum(), named) for o in (together, separate)), strict=True):
        assert_close(x, y, DOUBLE, "gradients")


@pytest.mark.parametrize("name", ["ttt", "titans"])
def test_scale_multiplies_the_read_and_unit_length_is_made_inside(name):
    call = draw_network_call(name, T=9)
    outside = call.map(lambda path, x: x)
    for key in "qk":
        x = call.tokens[key]
        outside.tokens[key] = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    for form in ("recurrent", "chunk"):
        got, _ = call.run(scale=0.7, use_qk_l2norm_in_kernel=True, form=form)
        assert_close(got, 0.7 * outside.run(form="recurrent")[0], DOUBLE)


def test_gradients_reach_the_first_weights_once_and_not_beside_a_state():
    call = draw_network_call("titans", T=9, state=True).tracked()
    found = torch.autograd.grad(call.run()[0].sum(), list(call.shared["weights"]), allow_unused=True)
    assert found == (None,)
