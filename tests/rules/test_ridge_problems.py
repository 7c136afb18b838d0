"""Memories that solve a ridge problem: recursive least squares and Mesa."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from innerloop import ops, rules
from innerloop.algebra.conjugate_gradients import conjugate_gradients
from innerloop.testing import assert_close, draw_call, error, gradients, outcome

DOUBLE = torch.float64


def qkv(**sizes):
    call = draw_call("linear_attention", **sizes)
    return call.q, call.k, call.v


def test_recursive_least_squares_solves_the_ridge_problem_of_every_prefix():
    q, k, v = qkv(G=2)
    o, _ = ops.recursive_least_squares(q, k, v, ridge=0.3)
    for t in (0, 4, 36):
        keys, values = (x[:, : t + 1].transpose(1, 2) for x in (k, v))
        fit = torch.linalg.solve(keys.mT @ keys + 0.3 * torch.eye(5, dtype=DOUBLE), keys.mT @ values)
        assert_close(o[:, t], torch.einsum("bhkv,bhk->bhv", fit, q[:, t]), DOUBLE)


def test_recursive_least_squares_resets_at_minus_infinity():
    q, k, v = qkv(G=2)
    g = torch.zeros(2, 37, 2, dtype=DOUBLE)
    g[:, 20] = -torch.inf
    o, _ = ops.recursive_least_squares(q, k, v, g=g)
    assert_close(o[:, 20:], ops.recursive_least_squares(q[:, 20:], k[:, 20:], v[:, 20:])[0], DOUBLE)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_recursive_least_squares_without_a_decay_has_one_of_zero(form):
    call = draw_call("recursive_least_squares", B=1, T=19, state=True)
    call.gates["g"][:] = 0
    bounds = torch.tensor([0, 4, 19])
    for options in ({}, {"cu_seqlens": bounds}):
        call.state = draw_call("recursive_least_squares", B=1 + bool(options), state=True).state
        want = call.tracked()
        truth = want.run(form=form, **options)
        got = want.tracked()
        got.gates = {}
        result = got.run(form=form, **options)
        assert_close(outcome(got.rule, result), outcome(got.rule, truth), DOUBLE)
        slopes = gradients(want, truth)
        del slopes["g"]
        assert_close(gradients(got, result), slopes, DOUBLE, "gradients")


def mesa_moments(call, t):
    """Return ``H_kk + diag lamb`` and ``H_kv`` of a mesa call after token t, by a sum over all pairs."""
    fade = call.gates["g"][:, 1 : t + 1].flip(1).cumsum(1).flip(1).exp()  # [B, t, G]: after each pair but the last
    weight = call.gates["beta"][:, : t + 1] * torch.cat((fade, torch.ones_like(fade[:, :1])), 1)[:, : t + 1]
    keys = call.k[:, : t + 1].repeat_interleave(2, 2)
    covariance = torch.einsum("bsg,bsgk,bsgl->bgkl", weight, keys, keys)
    cross = torch.einsum("bsg,bsgk,bsgv->bgkv", weight, keys, call.v[:, : t + 1])
    return covariance + call.gates["lamb"].diag_embed(), cross


@pytest.mark.parametrize("iterations", [5, 10])
@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_mesa_solves_the_weighted_ridge_problem_of_every_prefix(form, iterations):
    call = draw_call("mesa", T=19)  # K = 5
    o, _ = call.run(form=form, chunk_size=4, iterations=iterations)
    for t in (1, 7, 18):
        matrix, cross = mesa_moments(call, t)
        fit = torch.linalg.solve(matrix, cross)
        assert_close(o[:, t], torch.einsum("bgkv,bgk->bgv", fit, call.q[:, t].repeat_interleave(2, 1)), DOUBLE)


def test_mesa_with_one_ridge_and_no_decay_is_recursive_least_squares_and_the_batch_ridge():
    q, k, v = (x.requires_grad_() for x in qkv(G=2))
    want, _ = ops.recursive_least_squares(q, k, v, ridge=0.3)
    slopes = torch.autograd.grad(want.square().sum(), (q, k, v))
    for form in ("recurrent", "chunk"):
        o, _ = ops.mesa(q, k, v, lamb=torch.full((2, 5), 0.3, dtype=DOUBLE), iterations=10, form=form)
        assert_close(o, want, DOUBLE)
        for got, slope in zip(torch.autograd.grad(o.square().sum(), (q, k, v)), slopes, strict=True):
            assert_close(got, slope, DOUBLE, "gradients")
    keys, values = (x.transpose(1, 2) for x in (k, v))
    fit = torch.linalg.solve(keys.mT @ keys + 0.3 * torch.eye(5, dtype=DOUBLE), keys.mT @ values)
    assert_close(want[:, -1], torch.einsum("bhkv,bhk->bhv", fit, q[:, -1]), DOUBLE)


def test_mesa_that_stops_early_is_the_same_in_every_form_and_no_solution():
    call = draw_call("mesa", T=23, K=16, state=True).tracked()
    exact, _ = call.run()
    for steps in (1, 3):
        truth = call.run(form="recurrent", iterations=steps)
        want, slopes = outcome(call.rule, truth), gradients(call, truth)
        assert error(want["o"], exact) > 1e-3
        for size in (1, 4, 16, 64):
            got = call.run(form="chunk", chunk_size=size, iterations=steps)
            assert_close(outcome(call.rule, got), want, DOUBLE)
            assert_close(gradients(call, got), slopes, DOUBLE, "gradients")
        state = call.state
        for t in range(23):
            gates = {name: x if name == "lamb" else x[:, t] for name, x in call.gates.items()}
            o, state = ops.step(
                "mesa", call.q[:, t], call.k[:, t], call.v[:, t], state=state, iterations=steps, **gates
            )
            assert_close(o, want["o"][:, t], DOUBLE)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the framework's own
@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_mesa_that_stops_early_stops_early_under_transforms_too(form):
    call = draw_call("mesa", T=9, K=16, state=True)
    want, _ = call.run(form=form, iterations=2)

    def run(v):
        return call.map(lambda name, x: v if name == "v" else x).run(form=form, iterations=2)[0]

    assert_close(torch.func.vmap(run)(call.v[None])[0], want, DOUBLE)
    assert_close(torch.func.jvp(run, (call.v,), (call.v,))[0], want, DOUBLE)
    assert_close(torch.func.vjp(run, call.v)[0], want, DOUBLE)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_mesas_gradient_solves_again_instead_of_going_back_through_the_steps(form):
    call = draw_call("mesa", T=9, K=16, G=2, H=1)
    q = call.q.clone().requires_grad_()
    weight = torch.randn(call.v.shape, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    o, _ = ops.mesa(q, call.k, call.v, **call.gates, iterations=2, form=form)
    (slope,) = torch.autograd.grad((o * weight).sum(), q)
    matrix, cross = mesa_moments(call, 8)
    right = torch.einsum("bgkv,bgv->bgk", cross, weight[:, 8])
    solution = conjugate_gradients(
        lambda x: torch.einsum("bgkl,bgl->bgk", matrix, x),
        right,
        iterations=2,
        diagonal=call.gates["lamb"],
        start=right / matrix.diagonal(dim1=-2, dim2=-1),
    )
    assert_close(slope[:, 8, 0], solution.sum(1), DOUBLE, "gradients")


def test_mesa_needs_few_steps_where_keys_point_few_ways():
    call = draw_call("mesa", B=1, T=256, H=1, G=1, K=32)
    call.k[:] = call.k[:, :3].repeat(1, 86, 1, 1)[:, :256]
    call.gates["g"][:] = 0
    want, _ = call.run(form="chunk", iterations=64)
    for form in ("recurrent", "chunk"):  # three directions beside the ridge's
        assert_close(call.run(form=form, iterations=6)[0], want, DOUBLE)


@pytest.mark.parametrize("left_out", [("g",), ("beta",), ("g", "beta")])
@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_mesa_without_a_gate_has_no_decay_and_pairs_of_weight_one(form, left_out):
    bounds = torch.tensor([0, 4, 19])
    for options in ({}, {"cu_seqlens": bounds}):
        call = draw_call("mesa", B=1, T=19)
        call.state = draw_call("mesa", B=1 + bool(options), state=True).state
        for gate in left_out:
            call.gates[gate][:] = 0.0 if gate == "g" else 1.0
        call = call.tracked()
        truth = call.run(form=form, **options)
        bare = call.tracked()
        bare.gates = {name: x for name, x in bare.gates.items() if name not in left_out}
        result = bare.run(form=form, **options)
        assert_close(outcome(call.rule, result), outcome(call.rule, truth), DOUBLE)
        slopes = {name: x for name, x in gradients(call, truth).items() if name not in left_out}
        assert_close(gradients(bare, result), slopes, DOUBLE, "gradients")


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_mesa_makes_a_given_covariance_symmetric(form):
    call = draw_call("mesa", T=5, state=True)
    whole = torch.randn(call.state.H_kk.shape, generator=torch.Generator().manual_seed(2), dtype=DOUBLE)
    want = outcome(call.rule, call.run(form=form))
    call.state = call.state._replace(H_kk=call.state.H_kk + whole - whole.mT)
    call = call.tracked()
    result = call.run(form=form)
    assert_close(outcome(call.rule, result), want, DOUBLE)
    slope = gradients(call, result)["H_kk"]
    assert_close(slope, slope.mT, DOUBLE, "gradients")


def test_mesas_ridge_belongs_to_its_head_and_channel():
    call = draw_call("mesa", T=5)
    o, _ = call.run()
    call.gates["lamb"][2, 3] *= 1.5
    other, _ = call.run()
    changed = (o != other).any(-1).any(1).any(0)
    assert changed.tolist() == [False, False, True, False]
    for wrong, match in (
        (call.gates["lamb"][:, 0], r"lamb must have shape \[G, K\]"),
        (call.gates["lamb"].T, r"lamb must have shape \[G, K\] with G=4, K=5"),
        (0 * call.gates["lamb"], "lamb must be finite and at least 1.2e-38; got a minimum of 0"),
    ):
        with pytest.raises(ValueError, match=match):
            ops.mesa(call.q, call.k, call.v, lamb=wrong)
    for wrong, match in ((0, "finite and above 0"), (2.5, "a whole number; got 2.5")):
        with pytest.raises(ValueError, match=f"iterations must be {match}"):
            ops.mesa(call.q, call.k, call.v, lamb=call.gates["lamb"], iterations=wrong)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        found = result if isinstance(result, (tuple, list)) else (result,)
        self.numel = max([self.numel, *(x.numel() for x in found if isinstance(x, torch.Tensor))])
        return result


def test_mesa_forms_no_covariance_of_a_token():
    call = draw_call("mesa", B=1, T=128, H=1, G=1, K=32, V=8)
    operator = rules.mesa.MESA
    gates = call.rule.complete(call.gates, call.v).values()
    rest = (None, None, None, 1.0, False, 16, (4.0,), 0, False)
    with Largest() as forward:
        operator._forward(call.q, call.k, call.v, *gates, *rest)
    with Largest() as backward:
        needs = [True] * 6 + [False] * 2
        operator._gradients(call.q, call.k, call.v, *gates, *rest, torch.ones_like(call.v), None, None, needs)
    assert max(forward.numel, backward.numel) < 128 * 32 * 32 / 8


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_a_document_whose_keys_leave_the_ridge_below_rounding_harms_no_other(form):
    q, k = torch.randn(2, 1, 40, 1, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    v = torch.randn(1, 40, 1, 2, generator=torch.Generator().manual_seed(1))
    k = torch.cat((1e5 * k[:, :20], k[:, 20:]), 1)
    packed, _ = ops.recursive_least_squares(q, k, v, cu_seqlens=torch.tensor([0, 20, 40]), form=form)
    alone, _ = ops.recursive_least_squares(q[:, 20:], k[:, 20:], v[:, 20:], form=form)
    assert packed.isfinite().all()
    assert_close(packed[:, 20:], alone, torch.float32)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_a_ridge_below_rounding_still_answers_with_what_was_written(form):
    call = draw_call("recursive_least_squares", B=1, T=200, H=1, G=1, K=4, V=3, dtype=torch.float32)
    call.k[:] = 1000 * call.k[:, :1].clone()  # |H| eps is far above the ridge
    call.q[:] = call.k
    call.gates = {}
    out, _ = call.tracked().run(form=form, ridge=1e-6)
    assert_close(out[:, -1], call.v.mean(1), torch.float32)
    out.sum().backward()


def test_a_moment_that_is_no_sum_of_squares_is_its_rows_alone():
    call = draw_call("recursive_least_squares", B=2, T=3, H=1, G=1, K=3, V=2, state=True)
    broken = call.state._replace(H_kk=call.state.H_kk - torch.tensor([[[[100.0]]], [[[0.0]]]]) * torch.eye(3))
    want, _ = call.run()
    call.state = broken
    for form in ("recurrent", "chunk"):
        out, _ = call.run(form=form)
        assert out[0].isnan().all()
        assert_close(out[1], want[1], DOUBLE)
