"""Inputs in bfloat16, multiplied in pairs: the way of a processor with AVX512-BF16, taken here because it is asked for.

One instruction is left that only such a processor runs (`make emulate`).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from innerloop.kernels.native import instruction_set, missing
from innerloop.testing import draw_call, outcome
from innerloop.testing.compare import error

RULES = ("linear_attention", "retention", "mamba2", "delta_rule", "gated_delta_rule", "longhorn", "delta_product")
SIZES = ((13, 11, 70, 64), (16, 32, 33, 16), (33, 1, 64, 5), (1, 17, 9, 4), (64, 65, 41, 17))
BAR = 2e-3
"""On what is read of a rounded memory; o is rounded to bfloat16 after it."""
ROUNDED = 2.0**-8
FLAG = "INNERLOOP_PAIRS"
ASKED = os.environ.get(FLAG) == "1"
pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "present")
pairs = pytest.mark.skipif(not ASKED, reason="run in a process of its own, below")
alone = pytest.mark.skipif(ASKED, reason="this is that process")


def calls(name, unit):
    for i, (K, V, T, chunk) in enumerate(SIZES):
        call = draw_call(name, T=T, K=K, V=V, B=2, H=1, G=2, dtype=torch.bfloat16, state=bool(i % 2) != unit)
        call.options = {"use_qk_l2norm_in_kernel": unit, "chunk_size": chunk}
        yield call.map(lambda n, x: 3 * x if n in "qk" else x) if unit else call


def exact(call, **options):
    wide = call.to(torch.float64)
    wide.options = {n: x for n, x in call.options.items() if n != "chunk_size"}
    return outcome(call.rule, wide.run(form="recurrent", **options))


def held(got, want, name):
    """Nothing that was rounded is in a state; an output has the error of a rounded memory and its own rounding."""
    assert error(got["S"], want["S"]) < 2e-5, name
    assert error(got["o"], want["o"]) < BAR + ROUNDED, name


@pairs
@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_pairs_give_what_the_token_loop_gives(name, unit):
    for call in calls(name, unit):
        held(outcome(call.rule, call.run(backend="cpu")), exact(call), f"{name} {tuple(call.k.shape)}")


@pairs
@pytest.mark.parametrize("name", ["mamba2", "gated_delta_rule"])
def test_packed_sequences_and_strides_of_any_kind_take_pairs(name):
    bounds = torch.tensor([2, 5, 5, 38, 39, 64])
    call = draw_call(name, T=66, K=13, V=11, B=1, H=2, G=4, dtype=torch.bfloat16)
    want = exact(call, cu_seqlens=bounds)
    got = outcome(call.rule, call.run(backend="cpu", cu_seqlens=bounds))
    held({n: x[:, 2:64] if n == "o" else x for n, x in got.items()},
         {n: x[:, 2:64] if n == "o" else x for n, x in want.items()}, name)  # fmt: skip
    apart = call.map(lambda n, x: torch.stack((x, torch.full_like(x, torch.nan)), -1)[..., 0])
    heads_first = call.map(lambda n, x: x.transpose(1, 2).contiguous().transpose(1, 2) if n in "qkv" else x)
    for other in (apart, heads_first):
        assert other.q.stride() != call.q.stride()
        same = outcome(call.rule, other.run(backend="cpu", cu_seqlens=bounds))
        assert all(torch.equal(same[n], x) for n, x in got.items())


@pairs
def test_a_row_beyond_the_range_of_float_is_zero_as_a_unit_vector():
    call = draw_call("gated_delta_rule", T=20, K=8, V=4, B=1, H=1, G=1, dtype=torch.bfloat16)
    call.options = {"use_qk_l2norm_in_kernel": True}
    call.k[:, 3] = call.q[:, 5] = 3e38
    without = call.map(lambda _, x: x.clone())
    without.k[:, 3], without.q[:, 5] = 0, 0
    for got, want in zip(*(outcome(c.rule, c.run(backend="cpu")).values() for c in (call, without)), strict=True):
        assert torch.equal(got, want)


@pairs
def test_a_number_that_is_none_reaches_the_outputs():
    for value in (torch.nan, torch.inf):
        call = draw_call("mamba2", T=20, K=8, V=4, B=1, H=1, G=1, dtype=torch.bfloat16, state=True)
        call.state = call.state.float()
        call.state[0, 0, 3, 2] = value
        o, _ = call.run(backend="cpu")
        assert not o[0, :, 0, 2].isfinite().any()
        assert o[0, :, 0, [0, 1, 3]].isfinite().all()
    # A NaN whose bits are all ones must not become a zero when it is rounded.
    call.state[0, 0, 3, 2] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    assert call.run(backend="cpu")[0][0, :, 0, 2].isnan().all()


@pairs
@pytest.mark.slow
@pytest.mark.parametrize("T", [512, 4096])
@pytest.mark.parametrize("name", ["mamba2", "gated_delta_rule"])
def test_long_sequences_and_repeated_keys_stay_within_the_bar(name, T):
    for keys, pace in ((T, 0.0), (T, 0.01), (8, 0.0), (8, 0.01), (1, 0.0)):
        call = draw_call(name, T=T, K=64, V=64, B=1, H=1, G=2, dtype=torch.bfloat16)
        call.k = call.k[:, torch.arange(T) % keys]
        call.gates = {n: torch.ones_like(x) if n == "beta" else x * pace for n, x in call.gates.items()}
        held(outcome(call.rule, call.run(backend="cpu")), exact(call), f"{name} {T} {keys} {pace}")


def other_process(code, **environment):
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return found.stdout.split()


@alone
def test_pairs_change_bfloat16_alone():
    code = (
        "import torch; from innerloop.testing import draw_call, gradients, outcome\n"
        "for name in ('mamba2', 'gated_delta_rule'):\n"
        "    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):\n"
        "        call = draw_call(name, T=70, K=33, V=17, dtype=dtype, state=True).tracked()\n"
        "        result = call.run(backend='cpu')\n"
        "        found = {**outcome(call.rule, result), **gradients(call, result)}\n"
        "        print(dtype, *(f'{n}={x.double().abs().sum().item().hex()}' for n, x in found.items()), sep='/')\n"
    )
    found = [other_process(code, **{FLAG: on}) for on in ("0", "1")]
    for without, asked in zip(*found, strict=True):
        assert (without != asked) == ("bfloat16" in without)
    assert other_process(code, **{FLAG: ""}) == found[instruction_set() == "avx512_bf16"]


@alone
def test_all_of_this_holds_where_pairs_are_asked_for():
    robust = (
        "nothing_is_read_or_written_beside_a_tensor", "what_a_call_leaves_behind_reaches_no_other",
        "a_row_does_not_depend_on_the_rest_of_the_batch", "a_thread_count_gives_the_same_bits_every_time",
    )
    chosen = [__file__, *(f"{Path(__file__).with_name('test_robustness.py')}::test_{name}" for name in robust)]
    words = "pairs or gated_delta_rule and not momentum"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", words, *chosen]
    found = subprocess.run(command, env={**os.environ, FLAG: "1"}, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-3000:]
