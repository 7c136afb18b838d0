"""Decays by channel at their edges, and the truth of the two rules that are no recipe."""

import pytest
import torch

from innerloop.algebra.channel import faded_products
from innerloop.shapes import align_heads
from innerloop.testing import assert_close, draw_call, gradients, outcome, truth
from innerloop.testing.compare import forms

DOUBLE = torch.float64
RULES = ["gla", "kda", "gdn2", "rwkv7"]


def hold(call, what):
    """Hold values and gradients of the chunk form in both precisions to the float64 loop on the same numbers."""
    for dtype in (DOUBLE, torch.float32):
        own = call.to(dtype)
        values, slopes = truth(own)
        # At g = -100 the slope of g lies below the numbers that float32 has.
        slopes = {name: x for name, x in slopes.items() if not 0 < x.abs().max() < torch.finfo(dtype).tiny}
        for form in forms(call.rule, (16, 64)):
            if form["form"] == "recurrent":
                continue
            got = own.tracked()
            result = got.run(**form)
            assert_close(outcome(call.rule, result), values, dtype, "values", f"{what} {dtype} {form}")
            found = gradients(got, result)
            assert_close(found, slopes, dtype, "gradients", f"{what} {dtype} {form} gradient of")
            assert not found["g"][torch.isneginf(own.gates["g"])].any(), what


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("g", [-0.5, -2.5, -3.0, -5.0, -5.6, -20.0, -100.0])
def test_a_constant_decay_of_any_size_is_exact(rule, g):
    call = draw_call(rule, T=129, B=1, state=True)
    call.gates["g"][:] = g
    hold(call, f"g = {g}")


@pytest.mark.parametrize("rule", RULES)
def test_channels_that_keep_all_stand_beside_channels_that_keep_nothing(rule):
    for low in (-30.0, -5000.0, -torch.inf):
        call = draw_call(rule, T=129, B=1, state=True)
        call.gates["g"][..., ::2] = 0
        call.gates["g"][..., 1::2] = low
        hold(call, f"0 and {low} in turn")


@pytest.mark.parametrize("rule", RULES)
def test_one_decay_among_ordinary_ones_is_exact(rule):
    tiny = torch.tensor(1e-12, dtype=DOUBLE).log().item()
    for low in (tiny, -5000.0, -torch.inf):
        for channels in (slice(None), slice(2, 3)):
            for places in (slice(31, 32), slice(15, 17)):
                call = draw_call(rule, T=70, B=1, G=2, state=True)
                call.gates["g"][:, places, :, channels] = low
                hold(call, f"{low} at {places} in {channels}")


@pytest.mark.parametrize("rule", RULES)
def test_a_token_that_keeps_nothing_leaves_its_own_write(rule):
    call = draw_call(rule, T=20, B=1, G=2, state=True)
    call.gates["g"][:] = -torch.inf
    if "a" in call.gates:
        call.gates["a"][:] = 0  # what RWKV-7 erases, it erases from the unfaded memory
    hold(call, "nothing is kept")
    gate = {"kda": call.gates.get("beta", torch.zeros(1))[..., None], "gdn2": call.gates.get("w")}.get(rule, 1.0)
    write = call.k[:, -1, :, :, None] * (gate * call.v)[:, -1, :, None, :]
    assert_close(call.run(form="chunk")[1], write, DOUBLE)


@pytest.mark.parametrize("size", [1, 2, 5, 8, 9, 16, 31, 64, 100])
def test_products_are_what_their_definition_sums(size):
    generator = torch.Generator().manual_seed(size)
    draw = [torch.randn(2, size, 3, generator=generator, dtype=DOUBLE) for _ in range(4)]
    keep = torch.rand(2, size, 3, generator=generator, dtype=DOUBLE)
    keep[:, size // 2, 1] = 0
    products, rows, columns, whole = faded_products(tuple(draw[:2]), tuple(draw[2:]), keep)
    between = torch.zeros(2, size, size, 3, dtype=DOUBLE)
    for t in range(size):
        for s in range(t + 1):
            between[:, t, s] = keep[:, s + 1 : t + 1].prod(1)
    for i, x in enumerate(draw[:2]):
        assert_close(rows[i], x * keep.cumprod(1), DOUBLE)
        for j, y in enumerate(draw[2:]):
            assert_close(products[i][j], torch.einsum("btk,bsk,btsk->bts", x, y, between), DOUBLE)
            assert_close(columns[j], y * between[:, -1], DOUBLE)
    assert_close(whole[..., 0], keep.prod(1), DOUBLE)


# The framework's forward mode compiles its own decompositions in a way that it deprecates.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("rule", RULES)
def test_second_and_forward_derivatives_go_through_joined_blocks(rule):
    call = draw_call(rule, B=1, T=21, H=1, G=1, K=3, V=2, state=True)
    call.gates["g"][:, ::5, :, 0] = -torch.inf
    names = list(call.tensors())
    leaves = [x for x in call.tensors().values()]
    generator = torch.Generator().manual_seed(2)
    tangents = [torch.randn(x.shape, generator=generator, dtype=DOUBLE) for x in leaves]

    def slopes(*tensors, **form):
        given = dict(zip(names, tensors, strict=True))
        loss = call.map(lambda name, _: given[name]).run(**form)[0].square().sum()
        return torch.autograd.grad(loss, tensors, create_graph=True)

    found = []
    for form in ({"form": "recurrent"}, {"form": "chunk", "chunk_size": 16}, {"form": "chunk", "chunk_size": 64}):
        tracked = [x.detach().clone().requires_grad_() for x in leaves]
        inner = sum((slope * tangent).sum() for slope, tangent in zip(slopes(*tracked, **form), tangents, strict=True))
        second = torch.autograd.grad(inner, tracked)

        def values(*tensors, form=form):
            given = dict(zip(names, tensors, strict=True))
            return call.map(lambda name, _: given[name]).run(**form)[0]

        pushed = torch.func.jvp(values, tuple(leaves), tuple(tangents))[1]
        found.append((*second, pushed))
    for other in found[1:]:
        for name, got, want in zip((*names, "the forward mode"), other, found[0], strict=True):
            assert_close(got, want, DOUBLE, "gradients", name)


def aligned(call):
    heads = call.v.shape[-2]
    gates = {name: align_heads(x, heads) if name == "kappa" else x for name, x in call.gates.items()}
    return align_heads(call.q, heads), align_heads(call.k, heads), call.v, gates


def read(state, x):
    return torch.einsum("bgkv,bgk->bgv", state, x)


def run_by_autograd(call, move):
    """Run a call whose memory moves by ``move(state, k, v, gates)``, a function of one token."""
    q, k, v, gates = aligned(call)
    state, outputs = call.state, []
    for t in range(q.shape[1]):
        state = move(state.detach().requires_grad_(), k[:, t], v[:, t], {name: x[:, t] for name, x in gates.items()})
        outputs.append(call.rule.default_scale(q.shape[-1]) * read(state, q[:, t]))
    return {"o": torch.stack(outputs, 1), "S": state}


def test_gdn2_descends_the_inner_product_of_its_read_with_its_gated_error():
    def move(state, k, v, gates):
        faded = gates["g"].exp()[..., None] * state
        error = (read(faded, gates["b"] * k) - gates["w"] * v).detach()
        return faded - torch.autograd.grad((read(faded, k) * error).sum(), faded)[0]

    call = draw_call("gdn2", T=11, state=True)
    assert_close(outcome(call.rule, call.run(form="recurrent")), run_by_autograd(call, move), DOUBLE)


def test_rwkv7_descends_its_answer_at_kappa_by_channel_and_climbs_its_read_of_the_value():
    def move(state, k, v, gates):
        answer = torch.autograd.grad(0.5 * read(state, gates["kappa"]).square().sum(), state)[0]
        value = torch.autograd.grad((read(state, k) * v).sum(), state)[0]
        return gates["g"].exp()[..., None] * state - gates["a"][..., None] * answer + value

    call = draw_call("rwkv7", T=11, state=True)
    assert_close(outcome(call.rule, call.run(form="recurrent")), run_by_autograd(call, move), DOUBLE)
