"""What only compiled kernels can get wrong: threads, conversions, chunks, instruction sets."""

import os
import subprocess
import sys

import pytest
import torch

from innerloop import explain, ops, rules
from innerloop.checks import refusal
from innerloop.kernels.native import instruction_set, missing
from innerloop.testing import assert_close, draw_call, gradients, outcome
from innerloop.testing.compare import truth

SERVED = tuple(module.RULE.name for module in rules.ALL if not refusal(module.RULE))
pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "present")


def run_in_new_process(code, **environment):
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


def test_every_rule_of_the_native_families_is_served():
    assert set(SERVED) == {
        "linear_attention", "retention", "mamba2", "delta_rule", "gated_delta_rule", "longhorn", "delta_product",
        "gla", "kda", "gdn2", "rwkv7", "momentum_delta_rule",
    }  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_more_threads_change_no_bit(name):
    call = draw_call(name, T=70, B=3, K=64, V=64, dtype=torch.float32, state=True).tracked()
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            result = call.run(backend="cpu")
            found.append({**outcome(call.rule, result), **gradients(call, result)})
    finally:
        torch.set_num_threads(threads)
    for name, x in found[0].items():
        assert all(torch.equal(x, other[name]) for other in found[1:]), name


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize(("K", "V"), [(1, 1), (7, 9), (8, 16), (17, 33), (40, 24), (65, 130)])
def test_any_widths_serve(name, K, V):
    for dtype in (torch.float64, torch.float32):
        call = draw_call(name, T=71, B=1, H=1, G=2, K=K, V=V, state=True, dtype=dtype)
        values, slopes = truth(call)
        got = call.tracked()
        result = got.run(backend="cpu")
        assert_close(outcome(call.rule, result), values, dtype, "values", f"{dtype}")
        assert_close(gradients(got, result), slopes, dtype, "gradients", f"{dtype} gradient of")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 2])
def test_half_types_are_read_and_rounded_as_torch_does(dtype, length):
    v = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    v = v[v.isfinite() & ((v.float().abs() > 1e-35) | (v == 0))]  # a denormal bfloat16 is one in float32 too
    one = torch.ones(1, length, 1, 1, dtype=dtype)
    o, _ = ops.linear_attention(one, torch.cat((one[:, :1], 0 * one[:, 1:]), 1), v.expand(1, length, 1, -1), scale=1.0)
    assert torch.equal(o[0, -1, 0], v)
    for factor in (1 / 3, 1.5):  # the second lies in the middle between two neighbours, half of the time
        o, _ = ops.linear_attention(
            one, torch.cat((one[:, :1], 0 * one[:, 1:]), 1), v.expand(1, length, 1, -1), scale=factor
        )
        want = (v.float() * torch.tensor(factor)).to(dtype)
        kept = want.float().abs() > 1e-35
        assert torch.equal(o[0, -1, 0][kept], want[kept])


@pytest.mark.parametrize("name", SERVED)
def test_a_step_is_the_definition_in_every_precision(name):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        call = draw_call(name, T=1, K=19, V=21, state=True, dtype=dtype)
        q, k, v, *gates = (x[:, 0] for x in (call.q, call.k, call.v, *call.rule.complete(call.gates, call.v).values()))
        named = dict(zip((gate.name for gate in call.rule.gates), gates, strict=True))
        if name == "retention":
            named["g"] = call.gates["g"]
        for unit in (False, True):
            got = ops.step(name, q, k, v, state=call.state, use_qk_l2norm_in_kernel=unit, **named)
            exact = call.to(torch.float64)
            want = exact.run(form="recurrent", use_qk_l2norm_in_kernel=unit)
            assert_close(outcome(call.rule, (got[0][:, None], got[1])), outcome(call.rule, want), dtype)


def test_bounds_outside_of_the_row_are_refused_even_behind_the_checks():
    call = draw_call("linear_attention", B=1, T=5)
    for bounds in ([0, 6], [3, 1], [-1, 5]):
        with pytest.raises(ValueError, match="cu_seqlens must rise"):
            torch.ops.innerloop.additive(
                call.q, call.k, call.v, None, None, torch.tensor(bounds), 1.0, False, 64, [], 0, True
            )


def test_asking_for_what_cannot_serve_says_why():
    call = draw_call("gated_delta_rule", T=5)
    with pytest.raises(RuntimeError, match="form='recurrent' is the definition"):
        call.run(backend="cpu", form="recurrent")
    far = call.map(lambda _, x: x.to("meta"))
    with pytest.raises(RuntimeError, match="q is on meta"):
        far.run(backend="cpu")
    with pytest.raises(RuntimeError, match="mesa has no native kernel"):
        draw_call("mesa", T=5).run(backend="cpu")


def test_a_state_that_is_none_is_refused_in_words():
    call = draw_call("momentum_delta_rule", T=5)
    for state in (5, call.v):
        with pytest.raises(TypeError, match=r"must be MomentumState\(S, U\)"):
            ops.momentum_delta_rule(call.q, call.k, call.v, **call.gates, initial_state=state)


def test_a_momentum_that_moves_while_nothing_is_written_has_gradients():
    for state in (True, False):
        call = draw_call("momentum_delta_rule", T=40, B=2, K=9, V=6, state=state)
        for gates in ({"theta": 0.0}, {"eta": 0.0}, {"alpha": 1.0}, {"alpha": 0.0, "eta": 1.0}):
            edge = call.map(lambda name, x, gates=gates: torch.full_like(x, gates[name]) if name in gates else x)
            values, slopes = truth(edge)
            got = edge.tracked()
            result = got.run(backend="cpu")
            assert_close(outcome(edge.rule, result), values, torch.float64, what=f"{gates}")
            assert_close(gradients(got, result), slopes, torch.float64, "gradients", f"{gates} gradient of")


def test_a_plan_names_the_kernel():
    call = draw_call("gated_delta_rule", T=100)
    assert str(explain(ops.gated_delta_rule, call.q, call.k, call.v, **call.gates)).splitlines() == [
        "gated_delta_rule: chunk form in chunks of 32, cpu backend",
        "  T = 100: the chunk form is parallel in time",
        "  a native kernel serves it",
    ]


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize(("T", "K", "asked"), [(31, 8, None), (513, 128, None), (2049, 8, None), (2049, 8, 16)])
@pytest.mark.parametrize("records", [False, True])
def test_a_plan_names_the_chunk_that_a_call_takes(name, T, K, asked, records, monkeypatch):
    call = draw_call(name, T=T, B=1, H=1, G=1, K=K, V=K, dtype=torch.float32)
    call = call.tracked() if records else call
    native, taken = call.rule.family.native, []
    size = ops.explain(ops.run, name, call.q, call.k, call.v, **call.gates, chunk_size=asked).chunk_size
    whole = native.whole
    monkeypatch.setattr(native, "whole", lambda held, size, *rest: (taken.append(size), whole(held, size, *rest))[1])
    # What was prepared before is not prepared again.
    monkeypatch.setattr(native, "_prepared", type(native._prepared)())
    monkeypatch.setattr("innerloop.dispatch._READY", {})
    call.run(chunk_size=asked)
    assert taken == [size]
    steps = call.v.shape[1:-2].numel()
    large = K == 128 and type(native).__name__ != "Channel"
    long = records and (steps > 2048 or (large and steps > 512))
    assert size == min(asked or 64, 64 if long else 32)


def test_the_environment_turns_kernels_off():
    code = (
        "from innerloop import ops, rule; from innerloop.checks import refusal;"
        "print(refusal(rule.get('delta_rule')))"
    )
    assert "INNERLOOP_BACKEND=torch" in run_in_new_process(code, INNERLOOP_BACKEND="torch")


def test_every_instruction_set_of_this_machine_gives_the_same():
    code = (
        "import torch; from innerloop.testing import draw_call, gradients;"
        "from innerloop.kernels.native import instruction_set;"
        "calls = [draw_call(name, T=70, K=33, V=17, dtype=torch.float32).tracked()"
        " for name in ('gated_delta_rule', 'gla', 'gdn2', 'rwkv7')];"
        "print(instruction_set(), *(x.double().square().sum().item()"
        " for call in calls for x in gradients(call, call.run(backend='cpu')).values()))"
    )
    assert instruction_set() in {"plain", "avx2", "avx512", "avx512_bf16"}
    found = [run_in_new_process(code, INNERLOOP_ISA=most).split() for most in ("plain", "avx2", "")]
    assert found[0][0] == "plain"
    for other in found[1:]:
        assert [float(x) for x in other[1:]] == pytest.approx([float(x) for x in found[0][1:]], rel=1e-5)


@pytest.mark.parametrize("name", [rule.RULE.name for rule in rules.ALL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_overwritten_state_is_the_next_one(name, dtype):
    call = draw_call(name, T=1, K=19, V=37, state=True, dtype=dtype)
    q, k, v = (x[:, 0] for x in (call.q, call.k, call.v))
    gates = {gate: x[:, 0] for gate, x in call.rule.complete(call.gates, call.v).items() if x is not None}
    if name in {"retention", "mesa"}:
        gates |= {gate: call.gates[gate] for gate in ("g", "lamb") if gate in call.gates and call.gates[gate].ndim < 3}
    if call.rule.grows:
        with pytest.raises(ValueError, match="overwrite_state must be False for softmax_attention, whose state grows"):
            ops.step(name, q, k, v, state=call.state, overwrite_state=True, **gates)
        return
    want, after = ops.step(name, q, k, v, state=call.state, **gates)
    owned = call.map(lambda _, x: x.float().clone()).state
    places = [x.data_ptr() for x in call.rule.state_tensors(owned)]
    got, same = ops.step(name, q, k, v, state=owned, overwrite_state=True, **gates)
    assert [x.data_ptr() for x in call.rule.state_tensors(same)] == places
    assert torch.equal(got, want)
    for x, y in zip(call.rule.state_tensors(same), call.rule.state_tensors(after), strict=True):
        assert torch.equal(x, y)
    empty, first = ops.step(name, q, k, v, state=None, overwrite_state=True, **gates)
    assert torch.equal(empty, ops.step(name, q, k, v, state=None, **gates)[0])
    assert first is not None


def test_a_state_that_cannot_be_overwritten_is_refused():
    q, k, v = torch.randn(3, 2, 3, 4).unbind(0)
    state = torch.zeros(2, 3, 4, 4)
    tracked = state.clone().requires_grad_()
    wrong = ((state.double(), "contiguous state of torch.float32; got one of float64"), (state.mT, "contiguous state"),
             (tracked, "where a gradient is recorded"))  # fmt: skip
    for given, words in wrong:
        with pytest.raises(ValueError, match=words):
            ops.step("linear_attention", q, k, v, state=given, overwrite_state=True)
    with pytest.raises(TypeError, match="overwrite_state must be True or False; got 1"):
        ops.step("linear_attention", q, k, v, state=None, overwrite_state=1)
