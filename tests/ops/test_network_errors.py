"""A wrong call of a rule whose memory is a network gives one clear line: what, wanted, got, cure."""

import dataclasses

import pytest
import torch

from innerloop import network
from innerloop.testing import draw_network_call

NAMES = network.names()


def wrong(call, error, match, **options):
    with pytest.raises(error, match=match) as caught:
        call.run(**options)
    assert "\n" not in str(caught.value)


def changed(call, **tokens):
    return dataclasses.replace(call, tokens=call.tokens | tokens)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_must_be_float_tensors_of_one_shape_and_dtype(name):
    call = draw_network_call(name, T=9)
    for token, x in call.tokens.items():
        wrong(changed(call, **{token: x.long()}), TypeError, f"{token} must have dtype float64, .*; got int64")
        wrong(changed(call, **{token: x.tolist()}), TypeError, f"{token} must be a torch.Tensor; got list")
        if token != next(iter(call.tokens)):
            wrong(changed(call, **{token: x[:, :-1]}), ValueError, rf"{token} must have shape \[B, T, .*T=9.*\[2, 8")
            wrong(changed(call, **{token: x.half()}), TypeError, f"{token} must have .'s dtype float64.*; got float16")


@pytest.mark.parametrize("name", NAMES)
def test_a_gate_must_not_hold_nan(name):
    call = draw_network_call(name, T=9)
    for gate in call.rule.gates:
        x = call.tokens[gate.name].clone()
        x.flatten()[3] = torch.nan
        wrong(changed(call, **{gate.name: x}), ValueError, f"{gate.name} must not hold NaN")


@pytest.mark.parametrize("name", ["ttt", "titans"])
def test_options_are_checked(name):
    call = draw_network_call(name, T=9)
    for option, value, error, match in (
        ("mini_batch", 0, ValueError, "mini_batch must be a whole number above 0; got 0"),
        ("mini_batch", 2.5, TypeError, "mini_batch must be a whole number above 0; got 2.5"),
        ("chunk_size", 0, ValueError, "chunk_size must be at least 1"),
        ("form", "fast", ValueError, "form must be one of"),
        ("backend", "metal", ValueError, "backend must be None or one of"),
        ("backend", "cpu", RuntimeError, f"backend='cpu' cannot serve: {name} has no native kernel"),
        ("scale", float("inf"), ValueError, "scale must be finite"),
        ("output_final_state", 1, TypeError, "output_final_state must be True or False; got 1"),
        ("use_qk_l2norm_in_kernel", 1, TypeError, "use_qk_l2norm_in_kernel must be True or False; got 1"),
        ("cu_seqlens", torch.tensor([0, 9]), ValueError, "B must be 1; got B=2"),
    ):
        wrong(call, error, match, **{option: value})


@pytest.mark.parametrize("name", ["ttt", "titans"])
def test_heads_and_widths_must_fit(name):
    wrong(draw_network_call(name, H=3, G=4), ValueError, "v must have a multiple of q and k's heads; got 4 and 3")
    call = draw_network_call(name, T=9)
    wrong(changed(call, q=call.tokens["q"][..., :0], k=call.tokens["k"][..., :0]), ValueError, "K must be at least 1")
    first, *rest = call.shared["weights"]
    for weights, error, match in (
        ((first[:, :-1], *rest), ValueError, r"weights\[0\] must have shape \[G, K, V\] with G=4, K=5.*got \[4, 4"),
        ((first.long(), *rest), TypeError, r"weights\[0\] must have dtype"),
        ((), ValueError, "weights must be"),
        (first, TypeError if name == "ttt" else ValueError, "weights must be a tuple"),
    ):
        broken = dataclasses.replace(call, shared=call.shared | {"weights": weights})
        wrong(broken, error, match)


def test_what_one_rule_alone_wants_is_said():
    call = draw_network_call("titans", T=9)
    wrong(call, ValueError, "activation must be one of 'gelu', .*; got 'sine'", activation="sine")
    wrong(call, ValueError, "residual=True adds input to output: V must equal K=5; got 3", residual=True)
    wrong(call, TypeError, "normalize_step must be True or False; got 'yes'", normalize_step="yes")
    call = draw_network_call("ttt", T=9)
    wrong(changed(call, v=call.tokens["v"][..., :3]), ValueError, "the target is v - k: V must equal K=5; got 3")
    wrong(call, ValueError, r"position_offset must have shape \[mini_batch\] with mini_batch=8; got", mini_batch=8)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_must_be_the_rules_own(name):
    call = draw_network_call(name, T=9, state=True)
    state = call.state
    wrong(call, TypeError, f"the state of {name} must be .*position.; got tuple", initial_state=tuple(state))
    wrong(call, TypeError, f"the state of {name} must be", initial_state=state.position)
    wrong(call, TypeError, "position must have dtype int64; got int32",
          initial_state=state._replace(position=state.position.int()))  # fmt: skip
    wrong(call, ValueError, r"position must have shape \[2\]; got \[1\]",
          initial_state=state._replace(position=state.position[:1]))  # fmt: skip
    short = state._replace(**{state._fields[0]: state[0][:-1]})
    wrong(call, ValueError, "the initial state must hold", initial_state=short)
