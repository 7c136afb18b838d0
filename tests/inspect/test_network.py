"""Traces of memories that are networks, against the ops, the delta rule, and what the definitions say."""

import itertools
import math

import pytest
import torch

from innerloop import inspect, nn, ops
from innerloop.algebra.self_modifying import unit
from innerloop.inspect.network import KINDS

K, T = 4, 7


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def titans(depth=2, mini_batch=3, **more):
    """Return the tokens and options of a call of one row and two heads."""
    q, k, v = (unit(randn(1, T, 2, K, seed=n)) for n in range(3))
    theta, eta, alpha = (randn(1, T, 2, seed=n).sigmoid() for n in (3, 4, 5))
    widths = (K, *(6,) * (depth - 1), K)
    weights = tuple(randn(2, *pair, seed=n) / 2 for n, pair in enumerate(itertools.pairwise(widths)))
    gates = {"theta": 0.3 * theta, "eta": 0.5 * eta, "alpha": 0.1 * alpha}
    return (q, k, v), {**gates, "weights": weights, "mini_batch": mini_batch, **more}


def ttt():
    (q, k, v), _ = titans()
    weights = (randn(2, K, K) / 2, randn(2, K, seed=9) / 2)
    norm = {"norm_weight": 1 + 0.1 * randn(2, K, seed=10), "norm_bias": 0.1 * randn(2, K, seed=11)}
    return (q, k, v), {"lr": randn(1, T, 2).sigmoid(), "weights": weights, "mini_batch": 3,
                       "position_offset": 0.1 * randn(3, seed=12), **norm}  # fmt: skip


def hope():
    maps = [(randn(2, K, width, seed=n) / 4,) for n, width in enumerate((K, K, 1, 1, K))]
    weights = ops.HopeWeights(*maps, rate_bias=torch.zeros(2).double(), keep_bias=torch.full((2,), 2.0).double())
    return (randn(1, T, 2, K), unit(randn(1, T, 2, K, seed=1))), {"weights": weights, "mini_batch": (1, 1)}


CALLS = {"titans": titans, "ttt": ttt, "hope": hope}


@pytest.mark.parametrize("name", list(CALLS))
def test_the_memory_that_is_asked_is_the_one_that_is_read(name):
    tokens, options = CALLS[name]()
    op, memory, state = getattr(ops, name), KINDS[name](tokens, options), None
    o, _ = op(*tokens, **options)
    for t in range(T):
        at = {n: x[:, t : t + 1] if n in ("theta", "eta", "alpha", "lr") else x for n, x in options.items()}
        one = [x[:, t : t + 1] for x in tokens]
        _, state = op(*one, **at, initial_state=state, output_final_state=True)
        q = tokens[1 if name == "hope" else 0][0, t]
        read = memory.asked(state)(q[None])[0]
        # TTT's factor is the token's own: after the mini-batch's last it stands in the weights.
        torch.testing.assert_close(read, o[0, t], atol=1e-9, rtol=1e-9)


def test_one_layer_in_mini_batches_of_one_is_the_delta_rule():
    frame = torch.linalg.qr(randn(K, K))[0]
    k, v = frame[[0, 1, 0, 2, 1, 0, 3]][None, :, None], randn(1, T, 1, 3)
    rate, none = torch.rand(1, T, 1, generator=torch.Generator().manual_seed(2)).double(), torch.zeros(1, T, 1).double()
    options = {"theta": rate, "eta": none, "alpha": none, "weights": (torch.zeros(1, K, 3).double(),), "mini_batch": 1}
    found = inspect.trace_network("titans", (k, k, v), options)
    wanted = inspect.trace("delta_rule", k, k, v, beta=rate, scale=1.0)
    for name in ("surprise", "written", "rank"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), atol=1e-9, rtol=1e-9)
    assert found.returns is None and torch.equal(found.gates["theta"], wanted.gates["beta"])


@pytest.mark.parametrize("depth", [1, 2])
def test_only_a_matrix_has_a_rank(depth):
    found = inspect.trace_network("titans", *titans(depth))
    assert (found.rank is None) == (depth > 1)
    assert found.surprise.shape == found.written.shape == found.half_life.shape == (2, T)


def test_surprise_and_write_are_those_of_a_call_s_states():
    (q, k, v), options = titans()
    found = inspect.trace_network("titans", (q, k, v), options)
    for t in range(1, T):
        parts = []
        for end in (t, t + 1):
            cut = {n: x[:, :end] if n in ("theta", "eta", "alpha") else x for n, x in options.items()}
            _, state = ops.titans(q[:, :end], k[:, :end], v[:, :end], **cut, output_final_state=True)
            inside, outside = (w[0] for w in state.weights)
            hidden = torch.nn.functional.gelu(torch.einsum("gk,gkh->gh", k[0, t], inside))
            parts.append(torch.einsum("gh,ghv->gv", hidden, outside))
        error = v[0, t] - parts[0]
        torch.testing.assert_close(found.surprise[:, t], error.norm(dim=-1), atol=1e-9, rtol=1e-9)
        share = ((parts[1] - parts[0]) * error).sum(-1) / error.square().sum(-1)
        torch.testing.assert_close(found.written[:, t], share, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("life", [1, 3])
def test_forgetting_halves_a_write_s_effect(life):
    k, v = torch.eye(8).double()[None, :, None], randn(1, 8, 1, 3)
    one, none = torch.ones(1, 8, 1).double(), torch.zeros(1, 8, 1).double()
    options = {"theta": one, "eta": none, "alpha": one - 0.5 ** (1 / life) + 1e-9, "mini_batch": 1}
    found = inspect.trace_network("titans", (k, k, v), {**options, "weights": (torch.zeros(1, 8, 3).double(),)})
    assert found.half_life.tolist() == [[life if t + life < 8 else math.inf for t in range(8)]]


def test_hope_s_keys_and_targets_are_its_memories():
    (x, q), options = hope()
    found = inspect.trace_network("hope", (x, q), options)
    key, value, _, _, memory = (w[0] for w in options["weights"][:5])

    def answer(matrix, y):
        return y + torch.einsum("gk,gkv->gv", y, matrix)

    k, v = unit(answer(key, x[0, 0])), unit(answer(value, x[0, 0]))
    wanted = (answer(memory, v) - answer(memory, k)).norm(dim=-1)
    torch.testing.assert_close(found.surprise[:, 0], wanted, atol=1e-9, rtol=1e-9)
    assert found.rank.shape == (2, T)


def test_a_level_of_cms_writes_at_the_end_of_its_window():
    x, target = randn(1, T, 1, K), randn(1, T, 2, 1, K, seed=1)
    weights = tuple((randn(1, K, 6, seed=n) / 4, randn(1, 6, K, seed=n + 2) / 4) for n in range(2))
    options = {"weights": weights, "target": target, "rate": torch.full((1, T, 2, 1), 0.1).double(), "periods": (1, 3)}
    found = inspect.trace_network("cms", (x,), options)
    assert found.rank is None and (found.written[0] != 0).all()
    assert (found.written[1] != 0).tolist() == [t % 3 == 2 for t in range(T)]
    assert found.half_life[1, 0] == math.inf, "nothing was written that could be forgotten"
    first = x[0, 0] + torch.einsum("gh,ghd->gd", torch.nn.functional.gelu(
        torch.einsum("gd,gdh->gh", x[0, 0], weights[0][0]), approximate="tanh"), weights[0][1])  # fmt: skip
    torch.testing.assert_close(found.surprise[0, 0], (target[0, 0, 0] - first).norm(), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("variant", ["memory", "mac", "mag", "mal"])
def test_what_a_layer_of_titans_tells_makes_its_state(variant):
    torch.manual_seed(0)
    layer = nn.Titans(16, 2, variant=variant, mini_batch=3).double()
    with inspect.recording(layer) as calls:
        _, state = layer(randn(1, T, 16))
    told = [call for call in calls if call.rule == "titans"]
    assert len(told) == 1, "all segments are told of at once"
    call = told[0]
    _, after = ops.titans(*call.tokens, **call.options, output_final_state=True)
    for ours, wanted in zip(after.weights, state.memory.weights, strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-9, rtol=1e-9)
    assert calls[0].layer == "" and inspect.inspect_layer(layer, randn(1, T, 16)).rule == "titans"


def test_a_second_memory_is_named():
    torch.manual_seed(0)
    found = inspect.inspect_model(torch.nn.Sequential(nn.Hope(16, 2), Head()), randn(1, 5, 16).float())
    assert {name: trace.rule for name, trace in found.items()} == {"0": "hope", "0.levels": "cms"}


class Head(torch.nn.Module):
    """Takes the output of a layer, and leaves its state."""

    def forward(self, answer):
        return answer[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [({"names": ["a"]}, "tokens must name each of the T=7 tokens; got 1"), ({"rows": 2}, "tokens must have one row")],
)
def test_what_cannot_be_traced_is_refused(change, said):
    tokens, options = titans()
    if "rows" in change:
        tokens = tuple(x.expand(2, -1, -1, -1) for x in tokens)
    with pytest.raises(ValueError, match=said):
        inspect.trace_network("titans", tokens, options, change.get("names"))
