"""The published Longhorn: the diagonal of the proximal solution."""

import pytest
import torch

from innerloop import ops
from innerloop.algebra import diagonal
from innerloop.testing import assert_close, draw_call, gradients, outcome

DOUBLE = torch.float64


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_diagonal_longhorn_keeps_the_diagonal_of_the_proximal_solution(form):
    call = draw_call("longhorn_diagonal", B=1, T=5, H=1, G=1, K=3, V=2, state=True)
    channels = call.state[0, 0].T.clone()  # [V, K]: a problem of its own for each channel of the value
    outputs = []
    for q, k, v, beta in zip(*(x[0, :, 0] for x in (call.q, call.k, call.v, call.gates["beta"])), strict=True):
        for c in range(2):

            def solve(before, k=k, v=v[c], beta=beta[c]):
                def loss(s):
                    return 0.5 * (s - before).square().sum() + 0.5 * beta * (s @ k - v).square()

                slope, curvature = torch.func.grad(loss)(before), torch.func.jacrev(torch.func.grad(loss))(before)
                return before - torch.linalg.solve(curvature, slope)

            transition = torch.func.jacrev(solve)(channels[c])
            channels[c] = transition.diagonal() * channels[c] + solve(torch.zeros(3, dtype=DOUBLE))
        outputs.append(channels @ q)
    o, state = call.run(form=form, scale=1.0)
    assert_close(o[0, :, 0], torch.stack(outputs), DOUBLE)
    assert_close(state[0, 0].T, channels, DOUBLE)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_diagonal_longhorn_is_longhorn_where_keys_have_one_channel(form):
    call = draw_call("longhorn", K=1, state=True)
    call.k *= torch.linspace(0.1, 3, 37, dtype=DOUBLE)[:, None, None]
    want = outcome(call.rule, call.run())
    wide = call.gates["beta"][..., None].expand_as(call.v)
    options = {"initial_state": call.state, "output_final_state": True, "form": form}
    assert_close(outcome(call.rule, ops.longhorn_diagonal(call.q, call.k, call.v, beta=wide, **options)), want, DOUBLE)


def test_diagonal_longhorn_that_never_writes_keeps_all():
    call = draw_call("longhorn_diagonal", state=True)
    call.gates["beta"][:] = 0
    for form in ("recurrent", "chunk"):
        assert torch.equal(call.run(form=form)[1], call.state)


def test_diagonal_longhorn_overwrites_an_axis_at_the_largest_beta():
    largest = torch.finfo(torch.float32).max
    k = torch.eye(3).repeat(4, 1)[None, :, None]  # every axis four times
    v = torch.randn(1, 12, 1, 5, generator=torch.Generator().manual_seed(0))
    for form in ("recurrent", "chunk"):
        o, state = ops.longhorn_diagonal(
            k, 2 * k, v, beta=torch.full_like(v, largest), scale=1.0, output_final_state=True, form=form
        )
        assert_close(o, v / 2, torch.float32)
        assert_close(state[0, 0], v[0, 9:, 0] / 2, torch.float32)
    with pytest.raises(ValueError, match=r"beta must be finite and at least 0; got a maximum of inf"):
        ops.longhorn_diagonal(k, k, v, beta=torch.full_like(v, torch.inf))


@pytest.mark.parametrize("together", [1, 250, 1000])
def test_diagonal_longhorn_does_not_depend_on_how_many_chunks_run_together(together, monkeypatch):
    call = draw_call("longhorn_diagonal", state=True).tracked()
    truth = call.run(form="recurrent")
    want, slopes = outcome(call.rule, truth), gradients(call, truth)
    monkeypatch.setattr(diagonal, "TOGETHER", together)  # one memory is 2 x 4 x 5 x 3
    for size in (1, 4, 16):
        got = call.run(form="chunk", chunk_size=size)
        assert_close(outcome(call.rule, got), want, DOUBLE)
        assert_close(gradients(call, got), slopes, DOUBLE, "gradients")


def test_diagonal_longhorn_has_second_derivatives_over_several_parts(monkeypatch):
    monkeypatch.setattr(diagonal, "TOGETHER", 48)
    seconds = []
    for form in ({"form": "recurrent"}, {"form": "chunk", "chunk_size": 2}):
        call = draw_call("longhorn_diagonal", B=1, T=11, H=1, G=2, K=3, V=4, state=True).tracked()
        first = torch.autograd.grad(call.run(**form)[0].square().sum(), (call.q, call.k), create_graph=True)
        total = sum(x.square().sum() for x in first)
        seconds.append(
            dict(zip(call.tensors(), torch.autograd.grad(total, list(call.tensors().values())), strict=True))
        )
    assert_close(seconds[1], seconds[0], DOUBLE, "gradients")
