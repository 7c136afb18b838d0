"""What a trace says, against the op, the definition, and memories whose insides are known."""

import json
import math

import pytest
import torch

from innerloop import inspect, nn, ops, rules
from innerloop.inspect.reading import KINDS, effective_rank
from innerloop.inspect.recall import recall
from innerloop.lm import Config, LanguageModel
from innerloop.lm.kinds import KINDS as LAYERS
from innerloop.rule import get
from innerloop.testing import draw_call

READABLE = [x.RULE.name for x in rules.ALL if tuple(x.RULE.states) in KINDS]
MEANT = ("gdn2", "longhorn_diagonal")
"""Their gates act on channels of the value, whose mean a mark takes."""


def drawn(name, T=7):
    """Return a call's inputs as trace takes them."""
    call = draw_call(name, B=1, T=T, K=3, V=4)
    return {"q": call.q, "k": call.k, "v": call.v, **call.options, **call.gates}


def ortho(T, width, generator=None):
    generator = generator or torch.Generator().manual_seed(0)
    return torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0][:T][None, :, None]


def test_all_rules_of_matrices_and_pairs_can_be_looked_into():
    assert set(READABLE) == {x.RULE.name for x in rules.ALL}


@pytest.mark.parametrize("name", [name for name in READABLE if name not in MEANT and name != "delta_product"])
def test_the_parts_of_a_read_are_its_sum(name):
    inputs = drawn(name)
    found = inspect.trace(name, **inputs)
    o, _ = ops.run(name, **inputs, form="recurrent")
    v = inputs["v"].double()[0]
    if get(name).grouped:
        v = v.repeat_interleave(o.shape[2] // v.shape[1], 1)
    torch.testing.assert_close(torch.einsum("gti,igv->tgv", found.returns, v), o[0].double(), atol=1e-8, rtol=1e-7)


@pytest.mark.parametrize("name", READABLE)
def test_what_comes_later_has_no_part(name):
    found = inspect.trace(name, **drawn(name))
    assert found.returns.triu(1).eq(0).all()
    assert found.surprise.shape == found.written.shape == found.rank.shape == found.half_life.shape
    assert found.returns.shape == (*found.surprise.shape, 7)
    assert found.surprise.isfinite().all() and (found.surprise >= 0).all() and (found.rank < 7.1).all()


@pytest.mark.parametrize("name", ["delta_rule", "gated_delta_rule", "linear_attention", "gla", "momentum_delta_rule"])
def test_surprise_and_write_are_those_of_the_state_before_and_after(name):
    inputs = drawn(name)
    found = inspect.trace(name, **inputs)
    v = inputs["v"][0].double()
    heads = v.shape[1]
    k = inputs["k"][0].double().repeat_interleave(heads // inputs["k"].shape[2], 1)
    for t in range(7):
        cut = {n: x[:, : t + 1] if torch.is_tensor(x) else x for n, x in inputs.items()}
        before = {n: x[:, :t] if torch.is_tensor(x) else x for n, x in inputs.items()}
        states = [ops.run(name, **part, output_final_state=True)[1] for part in (before, cut)]
        memories = [(s if torch.is_tensor(s) else s.S)[0].double() for s in states]
        old, new = (torch.einsum("gkv,gk->gv", s, k[t]) for s in memories)
        error = v[t] - old
        torch.testing.assert_close(found.surprise[:, t], error.norm(dim=-1), atol=1e-8, rtol=1e-7)
        share = ((new - old) * error).sum(-1) / error.square().sum(-1)
        torch.testing.assert_close(found.written[:, t], share, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, 2.0])
def test_the_delta_rule_writes_beta_of_its_surprise(beta):
    k, v = ortho(6, 8)[:, [0, 1, 0, 2, 1, 0]], torch.randn(1, 6, 1, 3, generator=torch.Generator().manual_seed(1))
    found = inspect.trace("delta_rule", k, k, v, beta=torch.full((1, 6, 1), beta))
    torch.testing.assert_close(found.written, torch.full((1, 6), beta, dtype=torch.float64), atol=1e-9, rtol=0)
    assert torch.equal(found.gates["beta"], torch.full((1, 6), beta, dtype=torch.float64))


@pytest.mark.parametrize("life", [1, 3, 5])
def test_a_decay_halves_after_its_half_life(life):
    k = ortho(8, 8)
    g = torch.full((1, 8, 1), math.log(0.5) / life - 1e-9)
    found = inspect.trace("mamba2", k, k, torch.ones(1, 8, 1, 2), g=g)
    assert found.half_life.tolist() == [[life if t + life < 8 else math.inf for t in range(8)]]


def test_an_overwrite_ends_a_value_and_addition_does_not():
    k = ortho(3, 8)[:, [0, 1, 0, 2]]
    v = torch.eye(4)[None, :, None]
    edited = inspect.trace("delta_rule", k, k, v, beta=torch.ones(1, 4, 1))
    added = inspect.trace("linear_attention", k, k, v)
    assert edited.half_life.tolist() == [[2, math.inf, math.inf, math.inf]]
    assert added.half_life.isinf().all()
    assert edited.returned.tolist() == [[0, 1, 2, 3]]
    assert added.returns[0, 2].tolist() == pytest.approx([8**-0.5, 0, 8**-0.5, 0])


def test_the_rank_counts_what_is_held_apart():
    k = ortho(3, 8)[:, [0, 1, 1, 2]]
    v = torch.eye(4)[[0, 1, 1, 2]][None, :, None]
    assert inspect.trace("delta_rule", k, k, v, beta=torch.ones(1, 4, 1)).rank.tolist() == [pytest.approx([1, 2, 2, 3])]
    assert effective_rank(torch.zeros(2, 3, 4)).tolist() == [0, 0]
    assert effective_rank(torch.eye(5)[None]).item() == pytest.approx(5)


def test_nothing_read_is_said_so():
    k, v = ortho(2, 4), torch.ones(1, 2, 1, 1)
    found = inspect.trace("delta_rule", 0 * k, k, v, beta=torch.ones(1, 2, 1))
    assert found.returned.tolist() == [[-1, -1]]
    assert inspect.trace("mamba2", k[:, :0], k[:, :0], v[:, :0], g=v[:, :0, :, 0]).surprise.shape == (1, 0)


def test_unit_keys_are_made_as_the_op_makes_them():
    inputs = drawn("delta_rule")
    found = inspect.trace("delta_rule", **inputs, use_qk_l2norm_in_kernel=True, scale=2.0)
    o, _ = ops.delta_rule(**inputs, use_qk_l2norm_in_kernel=True, scale=2.0, form="recurrent")
    torch.testing.assert_close(torch.einsum("gti,igv->tgv", found.returns, inputs["v"][0]), o[0], atol=1e-8, rtol=1e-7)


def test_json_holds_it_all_and_no_infinity():
    found = inspect.trace("gated_delta_rule", **drawn("gated_delta_rule"), tokens=list("abcdefg"))
    stored = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert stored["tokens"] == list("abcdefg") and stored["gates"].keys() == {"g", "beta"}
    assert stored["returned"] == found.returned.tolist()


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"q": torch.zeros(2, 3, 1, 4)}, ValueError, "q must be one row"),
        ({"v": [1]}, TypeError, "v must be a tensor; got list"),
        ({"tokens": ["a"]}, ValueError, "tokens must name each of the T=3 tokens; got 1"),
        ({"beta": None}, ValueError, "beta"),
        ({"rate": 3}, ValueError, "rate"),
    ],
)
def test_what_cannot_be_traced_is_refused(change, kind, said):
    x = torch.zeros(1, 3, 1, 4)
    with pytest.raises(kind, match=said):
        inspect.trace(**{"rule": "delta_rule", "q": x, "k": x, "v": x, "beta": torch.ones(1, 3, 1), **change})


@pytest.mark.parametrize("name", list(LAYERS))
def test_every_layer_shows_its_heads(name):
    torch.manual_seed(0)
    model = LanguageModel(Config(vocab_size=11, width=16, heads=2, pattern=name))
    found = inspect.inspect_model(model, torch.tensor([[1, 2, 3, 2, 1]]), list("abcba"))
    trace = found["blocks.0.layer"]
    assert trace.tokens == list("abcba") and trace.rule == name
    assert (trace.surprise > 0).any() and trace.surprise.isfinite().all() and trace.written.isfinite().all()
    assert (trace.returns is None) == (name not in READABLE)
    json.dumps(trace.to_dict(), allow_nan=False)


def test_a_layer_in_a_model_is_what_it_is_alone():
    torch.manual_seed(0)
    layer = nn.GatedDeltaNet(16, 2)
    x = torch.randn(1, 5, 16)
    with inspect.recording(layer) as calls:
        layer(x)
    (call,) = calls
    o, _ = ops.gated_delta_rule(*call.tokens, **call.options)
    found = inspect.inspect_layer(layer, x)
    read = torch.einsum("gti,igv->tgv", found.returns, call.tokens[2][0].double())
    torch.testing.assert_close(read, o[0].double(), atol=1e-5, rtol=1e-4)
    with inspect.recording(layer) as after:
        pass
    assert after == []


def test_recording_ends_even_when_the_model_fails():
    layer = nn.DeltaNet(16, 2)
    with pytest.raises(RuntimeError), inspect.recording(layer) as calls:
        raise RuntimeError
    layer(torch.zeros(1, 3, 16))
    assert calls == []


def test_two_may_observe_a_layer_and_each_stops_alone():
    layer, first, second = nn.DeltaNet(16, 2), [], []
    with layer.observed(first.append):
        with layer.observed(second.append):
            layer(torch.zeros(1, 3, 16))
        layer(torch.zeros(1, 3, 16))
    layer(torch.zeros(1, 3, 16))
    assert (len(first), len(second)) == (2, 1) and first[0].function is ops.delta_rule


def test_a_model_without_layers_says_so():
    with pytest.raises(ValueError, match=r"must have a layer of innerloop.nn"):
        inspect.inspect_model(torch.nn.Identity(), torch.zeros(1, 3))


@pytest.mark.parametrize("name", READABLE)
def test_every_rule_has_a_recall_to_look_at(name):
    found = inspect.trace(name, **recall(get(name), {}))
    assert len(found.tokens) == 12 and found.tokens[-1].endswith("?")


def test_a_recall_is_answered_by_the_last_write():
    found = inspect.trace("delta_rule", **recall(get("delta_rule"), {}))
    for t, token in enumerate(found.tokens):
        if token.endswith("?"):
            key = token[:-1]
            last = max(i for i, other in enumerate(found.tokens) if other.startswith(f"{key}="))
            assert found.returned[0, t] == last and found.written[0, t] == 0
    with pytest.raises(ValueError, match="got an unknown 'gamma'"):
        recall(get("delta_rule"), {"gamma": 1.0})
