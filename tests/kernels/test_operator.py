"""The operator layer against plain torch: gradients of the steps, other axes of vmap, what lies outside of packing."""

from typing import ClassVar, NamedTuple

import pytest
import torch

from innerloop import Rule, ops, register, rules
from innerloop import rule as registry
from innerloop.checks import serves
from innerloop.testing import assert_close, draw_call, forms, gradients, outcome

NAMES = tuple(module.RULE.name for module in rules.ALL)
DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def without_kernels_in_steps(monkeypatch):
    """Let ``ops.step`` be plain torch, whatever kernels there are."""
    monkeypatch.setattr(
        "innerloop.dispatch.serves", lambda rule, q, form, backend: form != "auto" and serves(rule, q, form, backend)
    )


def stepped(call):
    """Run a call token by token through ``ops.step``, which is plain torch: no operator, no backward of ours."""
    timed = {gate.name for gate in call.rule.gates if "T" in gate.axes}
    state, outputs = call.state, []
    for t in range(call.q.shape[1]):
        gates = {name: x[:, t] if name in timed else x for name, x in call.gates.items()}
        out, state = ops.step(call.rule, call.q[:, t], call.k[:, t], call.v[:, t], state=state, **gates)
        outputs.append(out)
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_a_call_are_those_of_its_steps(name):
    call = draw_call(name, T=11, state=True).tracked()
    want = gradients(call, stepped(call))
    for form in forms(call.rule):
        assert_close(gradients(call, call.run(**form)), want, DOUBLE, "gradients", f"{form} gradient of")


@pytest.mark.parametrize("name", NAMES)
def test_vmap_takes_any_axis_of_some_of_the_inputs(name):
    call = draw_call(name, T=5, state=True)
    names, tensors = list(call.tensors()), list(call.tensors().values())
    mapped = {"q": 2, "v": 1, names[-1]: 3}
    several = [torch.stack((x, 0.5 * x), mapped[n]) if n in mapped else x for n, x in zip(names, tensors, strict=True)]

    for form in forms(call.rule, (2,)):

        def run(*tensors, form=form):
            given = dict(zip(names, tensors, strict=True))
            return tuple(outcome(call.rule, call.map(lambda name, _: given[name]).run(**form)).values())

        got = torch.func.vmap(run, in_dims=tuple(mapped.get(n) for n in names))(*several)
        for i, factor in enumerate((1.0, 0.5)):
            want = run(*(factor * x if n in mapped else x for n, x in zip(names, tensors, strict=True)))
            for x, y in zip(got, want, strict=True):
                assert_close(x[i], y, DOUBLE)


@pytest.mark.parametrize("name", ["gated_delta_rule", "softmax_attention"])
def test_packed_sequences_can_be_mapped(name):
    call = draw_call(name, B=1, T=9)
    bounds = torch.tensor([0, 2, 9])

    def run(v):
        return call.map(lambda name, x: v if name == "v" else x).run(cu_seqlens=bounds)[0]

    several = torch.stack((call.v, 0.5 * call.v), 2)
    got = torch.func.vmap(run, in_dims=2)(several)
    for i, factor in enumerate((1.0, 0.5)):
        assert_close(got[i], run(factor * call.v), DOUBLE)


@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors_of_half_types_are_like_the_real_ones(name):
    call = draw_call(name, T=5, dtype=torch.bfloat16)
    rule = call.rule
    gates = rule.complete(call.gates, call.v)
    constants = [constant.default for constant in rule.constants]
    inputs = (call.q, call.k, call.v, *gates.values(), *(None for _ in rule.states))
    options = (None, 0.5, True, 2, constants, 0, True)
    torch.library.opcheck(rule.loop._op, (*inputs, *options), test_utils="test_faketensor")


@pytest.mark.parametrize("name", NAMES)
def test_tokens_outside_of_all_packed_sequences_read_zero(name):
    call = draw_call(name, B=1, T=12)
    for form in forms(call.rule):
        o, _ = call.run(cu_seqlens=torch.tensor([2, 5, 10]), **form)
        assert (o[:, 2:10].abs().amax(-1) > 0).all()
        assert not o[:, :2].any()
        assert not o[:, 10:].any()


class Keys(NamedTuple):
    one: torch.Tensor
    two: torch.Tensor


class LastKey(Rule):
    """Keeps the newest key, twice: states that are inputs, and each other."""

    name = "last_key_of_a_test"
    departs = "it fits nothing"
    states: ClassVar = {"one": ("G", "K"), "two": ("G", "K")}
    state_type = Keys

    def step(self, q, k, v, *, state):
        return v * (state.one * q).sum(-1, keepdim=True), self.state_type(k, k)


def test_outputs_share_no_memory_with_inputs_or_each_other():
    register(LastKey())
    for rows in (1, 2):  # one token of one row is contiguous as it is
        call = draw_call("last_key_of_a_test", B=rows, H=4)
        out, state = call.run(form="recurrent")
        places = [x.untyped_storage().data_ptr() for x in (call.q, call.k, call.v, out, *state)]
        assert len(set(places)) == len(places)
        assert torch.equal(state.one, call.k[:, -1])
    for form in ("recurrent", "chunk"):
        attention = draw_call("softmax_attention", H=4)
        attention = attention.map(lambda _, x: x.transpose(1, 2).contiguous().transpose(1, 2))
        _, kept = attention.run(form=form)
        assert kept.keys.is_contiguous()  # as a compiler was told
        assert kept.keys.data_ptr() != attention.k.data_ptr()


@pytest.mark.parametrize("name", NAMES)
def test_what_a_call_returns_is_its_own(name):
    for length, kept in ((0, True), (3, True), (3, False)):
        for form in forms(registry.get(name)):
            call = draw_call(name, T=length, state=kept)
            out, state = call.run(**form)
            given = {id(x): x for x in (*call.tensors().values(), *call.rule.state_tensors(call.state))}.values()
            given = [x for x in given if x is not None and x.numel()]
            found = [x for x in (out, *call.rule.state_tensors(state)) if x.numel()]
            places = {x.untyped_storage().data_ptr() for x in (*given, *found)}
            assert len(places) == len(given) + len(found)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_call_returns_may_be_changed_in_place(name):
    for sizes, options in (({"T": 1}, {}), ({"T": 8, "H": 1, "G": 1}, {}), ({"T": 8}, {"cu_seqlens": [0, 3, 8]})):
        for form in forms(registry.get(name)):
            packing = {key: torch.tensor(x) for key, x in options.items()}
            call = draw_call(name, B=1, **sizes).tracked()
            out, state = call.run(**form, **packing)
            out += 1
            out *= 2
            for x in call.rule.state_tensors(state):
                if x.is_floating_point():
                    x.mul_(3)
            want_out, want = call.run(**form, **packing)
            tensors = zip(call.rule.state_tensors(state), call.rule.state_tensors(want), strict=True)
            pairs = [(out, 2 * (want_out + 1)), *((x, 3 * y) for x, y in tensors if x.is_floating_point())]
            inputs = [x for x in call.tensors().values() if x is not None and x.is_floating_point()]
            slopes = [torch.autograd.grad(sum(x.sum() for x in side), inputs, allow_unused=True)
                      for side in zip(*pairs, strict=True)]  # fmt: skip
            for x, y in (*pairs, *zip(*slopes, strict=True)):
                assert (x is None and y is None) or torch.equal(x, y)


@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences_may_all_be_empty(name):
    call = draw_call(name, B=1, T=80)
    call.state = draw_call(name, B=2, state=True).state
    for form in forms(call.rule):
        o, state = call.run(cu_seqlens=torch.tensor([1, 1, 1]), **form)
        assert not o.any()
        for got, want in zip(call.rule.state_tensors(state), call.rule.state_tensors(call.state), strict=True):
            kept = got[:, : want.shape[1]] if call.rule.grows and want.ndim > 1 else got
            assert torch.equal(kept, want)


@pytest.mark.parametrize("name", NAMES)
def test_truncated_at_no_seam_the_gradient_of_four_pieces_is_that_of_the_whole(name):
    call = draw_call(name, T=16, state=True).tracked()
    want = gradients(call, call.run(form="recurrent"))
    for form in forms(call.rule):
        state, outputs = call.state, []
        for start in range(0, 16, 4):
            piece = call.tokens(start, start + 4)
            piece.state = state
            out, state = piece.run(**form)
            outputs.append(out)
        assert_close(gradients(call, (torch.cat(outputs, 1), state)), want, DOUBLE, "gradients", f"{form} gradient of")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_pulled_back_may_have_any_strides(name):
    for form in forms(registry.get(name)):
        call = draw_call(name, T=6).tracked()
        out, _ = call.run(**form)
        leaves = list(call.tensors().values())
        drawn = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=DOUBLE)
        for seed in (
            drawn.transpose(0, 2).contiguous().transpose(0, 2),
            drawn[..., :1].expand_as(out),
            torch.stack((drawn, drawn + torch.nan), -1)[..., 0],
        ):
            got = torch.autograd.grad(out, leaves, seed, retain_graph=True)
            want = torch.autograd.grad(out, leaves, seed.contiguous(), retain_graph=True)
            for x, y in zip(got, want, strict=True):
                assert_close(x, y, DOUBLE, "gradients")
