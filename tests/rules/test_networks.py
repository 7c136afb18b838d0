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


def length_one(x):
    return x / (x.square().sum() + 1e-6).sqrt()


def ask(memory, x, residual):
    y = x @ memory[0] if len(memory) == 1 else ACTIVATIONS["gelu_tanh"](x @ memory[0]) @ memory[1]
    return x + y if residual else y


def hope_of_one_head(xs, qs, weights, *, mini_batch, rate_max=1.0, read="after", normalize_step=True,
                     normalize_v=True, residual=True, dgd="input"):  # fmt: skip
    """Return the reads and the last (weights, snapshots); ``weights`` are five memories and two biases."""
    *memories, rate_bias, keep_bias = weights
    memories = [list(m) for m in memories]
    snapshots, reads, adds = [list(m) for m in memories], [], [residual, residual, False, False, residual]
    for t, (x, q) in enumerate(zip(xs, qs, strict=True), start=1):
        key, value, rate, keep, _ = (ask(m, x, add) for m, add in zip(snapshots, adds, strict=True))
        k, v = length_one(key), length_one(value) if normalize_v else value
        rate, keep = rate_max * torch.sigmoid(rate[0] + rate_bias), torch.sigmoid(keep[0] + keep_bias)
        after = []
        for memory, frozen, add in zip(memories, snapshots, adds, strict=True):
            # Clones: the gradient is that of what answers the key, not of what made key and target.
            at = [w.clone() for w in frozen]
            found = slopes(((ask(at, k, add) - ask(frozen, v, add)) ** 2).sum() / 2, at)
            eye, damp = torch.eye(len(k), dtype=DOUBLE), [1.0, 1.0]
            if len(at) == 2 and normalize_step:
                h = ACTIVATIONS["gelu_tanh"](k @ at[0])
                damp = [1 / (1 + rate * at[1].norm() ** 2), 1 / (1 + rate * (h @ h))]
            moved = [(keep * eye - rate * torch.outer(k, k)) @ memory[0] - rate * damp[0] * found[0]]
            if len(at) == 2:
                h = length_one(ACTIVATIONS["gelu_tanh"](k @ at[0]))
                turn = keep * torch.eye(len(h), dtype=DOUBLE) - (dgd == "all") * rate * torch.outer(h, h)
                moved.append(turn @ memory[1] - rate * damp[1] * found[1])
            after.append(moved)
        reads.append(ask(after[4] if read == "after" else snapshots[4], q, residual))
        memories = after
        if t % mini_batch[0] == 0:
            snapshots[:4] = memories[:4]
        if t % mini_batch[1] == 0:
            snapshots[4] = memories[4]
    return torch.stack(reads), memories, snapshots


@pytest.mark.parametrize("variant", VARIANTS["hope"])
def test_hope_is_its_definition(variant):
    call = draw_network_call("hope", variant, T=11, B=1, H=2, K=3).tracked()
    for form in ("recurrent", "chunk"):
        out, state = call.run(form=form)
        named = {name: x for name, x in call.tensors().items() if "state" not in name}
        got = torch.autograd.grad(out.square().sum(), list(named.values()), retain_graph=True)
        total = 0
        for head in range(2):
            x, q = (call.tokens[name][0, :, head] for name in ("x", "q"))
            first = call.shared["weights"]
            weights = [[w[head] for w in m] for m in first[:5]] + [bias[head] for bias in first[5:]]
            reads, *ends = hope_of_one_head(x, q, weights, **call.settings)
            assert_close(out[0, :, head], reads, DOUBLE)
            for memories, wanted in zip(state[:-1], ends, strict=True):
                for memory, want in zip(memories, wanted, strict=True):
                    for w, y in zip(memory, want, strict=True):
                        assert_close(w[0, head], y, DOUBLE)
            total = total + reads.square().sum()
        wanted = torch.autograd.grad(total, list(named.values()), allow_unused=True, materialize_grads=True)
        for name, x, y in zip(named, got, wanted, strict=True):
            assert_close(x, y, DOUBLE, "gradients", name)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_with_mini_batches_of_one_a_repeated_pair_is_recalled_by_half(form):
    # The delta term and the loss pull alike, so the read settles half way to its target: "read returns v" is no test.
    eye, none = torch.eye(4, dtype=DOUBLE)[None], torch.zeros(1, 4, 4, dtype=DOUBLE)
    first = {"key": (none,), "value": (none,), "rate": (none[..., :1],), "keep": (none[..., :1],)}
    biases = {"rate_bias": torch.zeros(1, dtype=DOUBLE), "keep_bias": torch.full((1,), 40.0, dtype=DOUBLE)}
    # Key e1, value e2; what answers e2 is never written, so the target stays M(e2) = (0, 0, 1, 0) + e2.
    first["value"] = ((eye.roll(1, -1) - eye),)
    memory = torch.zeros_like(none)
    memory[0, 1, 2] = 1
    x = eye[0, 0].expand(1, 60, 1, 4)
    state, o = None, None
    weights = ops.HopeWeights(**first, memory=(memory,), **biases)
    for t in range(60):
        o, state = ops.hope(
            x[:, t : t + 1], x[:, t : t + 1], weights=weights, rate_max=0.5, mini_batch=(1, 1), form=form,
            initial_state=state, output_final_state=True,
        )  # fmt: skip
        held = tuple(tuple(w[None] for w in m) for m in weights[:4])
        state = state._replace(weights=(*held, state.weights[4]), snapshots=(*held, state.snapshots[4]))
    # x + x W: half of what W has to make is the target less the key.
    want = 0.5 * torch.tensor([-1.0, 1.0, 1.0, 0.0], dtype=DOUBLE) + eye[0, 0]
    assert_close(o[0, 0, 0], want, torch.float32)


def cms_of_one_head(xs, targets, rates, levels, periods, activation="gelu_tanh", normalize_step=False):
    """Return the outputs and the last (weights, sums) of the chain, token by token through all levels."""
    levels, sums = [list(pair) for pair in levels], [[torch.zeros_like(w) for w in pair] for pair in levels]
    outputs, updates = [], [0] * len(levels)
    for t, (h, target, rate) in enumerate(zip(xs, targets, rates, strict=True), start=1):
        for n, pair in enumerate(levels):
            y = h + ACTIVATIONS[activation](h @ pair[0]) @ pair[1]
            frozen = h + ACTIVATIONS[activation](h @ pair[0]) @ pair[1]
            found = slopes(((frozen - target[n]) ** 2).sum() / 2, pair)
            bends = [(h @ h) * pair[1].norm() ** 2, ACTIVATIONS[activation](h @ pair[0]).norm() ** 2]
            damp = [1 + normalize_step * periods[n] * rate[n] * bend for bend in bends]
            sums[n] = [s + rate[n] / d * g for s, g, d in zip(sums[n], found, damp, strict=True)]
            h = y
            if t % periods[n] == 0:
                levels[n] = [w - s for w, s in zip(pair, sums[n], strict=True)]
                sums[n] = [torch.zeros_like(w) for w in pair]
                updates[n] += 1
        outputs.append(h)
    return torch.stack(outputs), levels, sums, updates


@pytest.mark.parametrize("variant", VARIANTS["cms"])
def test_cms_is_its_definition(variant):
    call = draw_network_call("cms", variant, T=21, B=1, H=2, K=3).tracked()
    for form in ("recurrent", "chunk"):
        out, state = call.run(form=form)
        named = {name: x for name, x in call.tensors().items() if "state" not in name}
        got = torch.autograd.grad(out.square().sum(), list(named.values()), retain_graph=True)
        total = 0
        for head in range(2):
            x, target, rate = call.tokens["x"][0, :, head], call.tokens["target"][0, :, :, head], call.tokens["rate"]
            levels = [[w[head] for w in pair] for pair in call.shared["weights"]]
            y, *ends, updates = cms_of_one_head(x, target, rate[0, :, :, head], levels, **call.settings)
            assert updates == [21 // period for period in call.settings["periods"]]
            assert_close(out[0, :, head], y, DOUBLE)
            for pairs, wanted in zip(state[:2], ends, strict=True):
                for pair, want in zip(pairs, wanted, strict=True):
                    for w, z in zip(pair, want, strict=True):
                        assert_close(w[0, head], z, DOUBLE)
            total = total + y.square().sum()
        wanted = torch.autograd.grad(total, list(named.values()), allow_unused=True, materialize_grads=True)
        for name, x, y in zip(named, got, wanted, strict=True):
            assert_close(x, y, DOUBLE, "gradients", name)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_a_gradient_from_outside_has_the_derivatives_of_the_one_from_targets(activation):
    call = draw_network_call("cms", "odd", T=4)
    x, target, rate = (call.tokens[name] for name in ("x", "target", "rate"))
    x, rate = x.detach().requires_grad_(), rate[:, :, :1].detach().requires_grad_()
    weights = tuple(w.detach().requires_grad_() for w in call.shared["weights"][0])
    settings = {"weights": (weights,), "periods": (4,), "activation": activation, "rate": rate}
    _, wanted = ops.cms(x, target=target[:, :, :1], output_final_state=True, **settings)
    y, pending = ops.cms(x, target=None, output_final_state=True, **settings)
    got = ops.cms_update(pending, y - target[:, :, 0])  # what the targets of the only level stand for
    found = []
    for state in (got, wanted):
        loss = sum(w.square().sum() for w in state.weights[0])
        found.append((loss, *torch.autograd.grad(loss, (x, rate, *weights))))
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs, DOUBLE, "gradients")


def test_a_gradient_from_outside_moves_the_levels_by_the_chain_rule():
    call = draw_network_call("cms", "odd", T=11)
    call.tokens["target"] = None
    first = call.shared["weights"]
    deltas = torch.randn(2, 11, 2, 5, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))
    y, state = call.run()
    held = [[w.detach().expand(2, -1, -1, -1).clone().requires_grad_() for w in pair] for pair in first]
    h = call.tokens["x"].transpose(1, 2)
    for pair in held:
        h = h + ACTIVATIONS["silu"](h @ pair[0]) @ pair[1]
    assert_close(y.transpose(1, 2), h, DOUBLE)
    after = ops.cms_update(state, deltas)
    for n, period in enumerate((3, 5)):
        rate = call.tokens["rate"][:, :, n].transpose(1, 2)[..., None]
        closed = 11 // period * period
        wanted = []
        for tokens in (slice(0, closed), slice(closed, 11)):
            # Only this level's weights are scaled by its rates: the chain above carries the plain gradient.
            found = [torch.zeros_like(w) for w in held[n]]
            for t in range(11)[tokens]:
                slope = torch.autograd.grad((h[:, :, t] * deltas[:, t]).sum(), held[n], retain_graph=True)
                found = [a + rate[:, :, t][..., None] * b for a, b in zip(found, slope, strict=True)]
            wanted.append(found)
        for w, s, start, done, rest in zip(
            after.weights[n], after.accumulated[n], held[n], *wanted, strict=True
        ):
            assert_close(w, start - done, DOUBLE)
            assert_close(s, rest, DOUBLE)
    with pytest.raises(ValueError, match="state must have tokens that wait for their gradient; got none"):
        ops.cms_update(after, deltas)
    with pytest.raises(ValueError, match=r"delta must have shape \[B, T, H, D\] with B=2, T=11"):
        ops.cms_update(state, deltas[:, 1:])
