"""Rules whose memory is a network through ``run``, ``step`` and ``explain``: the same as by name, or one clear line."""

import pytest
import torch
from torch.utils import _pytree as pytree

from innerloop import ops
from innerloop.testing import draw_network_call, error


def pieces(call):
    """Return q, k, v, and all that has a name."""
    tokens = dict(call.tokens)
    return [tokens.pop(name) for name in "qkv"], {**tokens, **call.shared, **call.settings}, list(tokens)


@pytest.mark.parametrize("name", ["ttt", "titans"])
def test_run_is_the_rule_s_own_function(name):
    call = draw_network_call(name, T=11, state=True)
    (q, k, v), named, _ = pieces(call)
    options = {"scale": 0.5, "form": "recurrent", "use_qk_l2norm_in_kernel": True, "initial_state": call.state}
    want, after = call.run(**options)
    got, state = ops.run(name, q, k, v, **options, output_final_state=True, **named)
    assert torch.equal(got, want)
    assert torch.equal(state.position, after.position)
    packed = {"cu_seqlens": torch.tensor([0, 4, 11])}
    rows = draw_network_call(name, T=11, B=1)
    (q, k, v), named, _ = pieces(rows)
    assert torch.equal(ops.run(name, q, k, v, **packed, **named)[0], rows.run(**packed)[0])
    assert ops.run(name, q, k, v, **named)[1] is None


@pytest.mark.parametrize("name", ["ttt", "titans"])
def test_steps_walk_the_sequence_and_look_at_no_value(name):
    call = draw_network_call(name, T=9)
    (q, k, v), named, gates = pieces(call)
    want, after = call.run(scale=2.0)
    state = None
    for t in range(9):
        token = {**named, **{gate: named[gate][:, t] for gate in gates}}
        o, state = ops.step(name, q[:, t], k[:, t], v[:, t], state=state, scale=2.0, **token)
        assert error(o, want[:, t]) <= 1e-12
    for x, y in zip(pytree.tree_leaves(state), pytree.tree_leaves(after), strict=True):
        assert error(x.double(), y.double()) <= 1e-12
    token[gates[0]] = torch.full_like(token[gates[0]], torch.nan)
    try:
        o, _ = ops.step(name, q[:, 0], k[:, 0], v[:, 0], state=state, **token)
    except ValueError as refused:
        pytest.fail(f"a step looked at what it was given: {refused}")
    assert o.isnan().any()
    named[gates[0]] = torch.full_like(named[gates[0]], torch.nan)
    with pytest.raises(ValueError, match="must not hold NaN"):
        ops.run(name, q, k, v, **named)


def test_what_cannot_be_is_one_line():
    call = draw_network_call("titans", T=5)
    (q, k, v), named, gates = pieces(call)
    token = {**named, **{gate: named[gate][:, 0] for gate in gates}}
    q0, k0, v0 = q[:, 0], k[:, 0], v[:, 0]
    for act, line in (
        (lambda: ops.run("hope", q, k, v), r"its own keys and values.* call innerloop.ops.hope\(x, q, ...\)"),
        (lambda: ops.step("cms", q0, k0, v0, state=None), r"call innerloop.ops.cms\(x, target, ...\)"),
        (lambda: ops.run("titans", q, k, v, **{**named, "eta": None}), "titans needs 'eta'; got theta"),
        (lambda: ops.run("titans", q, k, v, **named, beta=v), "titans takes theta, eta, .*; got an unknown 'beta'"),
        (lambda: ops.step("ttt", q0, k0, v0, state=None), "ttt needs 'lr'; got none"),
        (lambda: ops.step("titans", q0, k0, v0, state=None, overwrite_state=True, **token), "leave it out"),
        (lambda: ops.step("titans", q, k, v, state=None, **named), "must have shape"),
        (lambda: ops.explain(ops.run, "hope", q, k, v), "hope makes its own keys and values"),
        (lambda: ops.explain(ops.run, "titans", q, k, v, **{**named, "mini_batch": 0}), "mini_batch must be a whole"),
    ):
        with pytest.raises(ValueError, match=line) as caught:
            act()
        assert "\n" not in str(caught.value)
    with pytest.raises(TypeError, match=r"theta must be a torch\.Tensor"):
        ops.step("titans", q0, k0, v0, state=None, **{**token, "theta": 0.5})


def test_a_step_is_explained_as_one():
    (q, k, v), named, gates = pieces(draw_network_call("ttt", T=5))
    token = {**named, **{gate: named[gate][:, 0] for gate in gates}}
    plan = ops.explain(ops.step, "ttt", q[:, 0], k[:, 0], v[:, 0], state=None, **token)
    assert (plan.rule, plan.form, plan.chunk_size) == ("ttt", "step", None)
