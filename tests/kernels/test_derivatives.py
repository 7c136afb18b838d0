"""Derivatives of every kind: forward mode, Hessians, second order through attention's fast path."""

import pytest
import torch

from innerloop import ops, rules
from innerloop import rule as registry
from innerloop.testing import assert_close, draw_call, forms

NAMES = tuple(module.RULE.name for module in rules.ALL)
DOUBLE = torch.float64
# The framework's forward mode compiles its own decompositions in a way that it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def of_keys(call, **form):
    def function(k):
        return call.map(lambda name, x: k if name == "k" else x).run(**form)[0]

    return function


@pytest.mark.parametrize("name", NAMES)
def test_forward_mode_agrees_with_reverse_mode(name):
    call = draw_call(name, B=1, T=6, H=1, G=1, K=3, V=3, state=True)
    for form in forms(call.rule):
        function = of_keys(call, **form)
        want = torch.func.jacrev(function)(call.k)
        assert_close(torch.func.jacfwd(function)(call.k), want, DOUBLE, "gradients", f"{form} jacfwd")
        tangent = torch.randn(call.k.shape, generator=torch.Generator().manual_seed(2), dtype=DOUBLE)
        along = (want * tangent).flatten(-tangent.ndim).sum(-1)
        assert_close(torch.func.jvp(function, (call.k,), (tangent,))[1], along, DOUBLE, "gradients", f"{form} jvp")
        with torch.autograd.forward_ad.dual_level():
            for leaf in (call.k, call.k.clone().requires_grad_()):
                dual = torch.autograd.forward_ad.make_dual(leaf, tangent)
                pushed = torch.autograd.forward_ad.unpack_dual(function(dual)).tangent
                assert_close(pushed, along, DOUBLE, "gradients", f"{form} dual numbers")


@pytest.mark.parametrize("name", NAMES)
def test_hessians_agree_in_every_order_of_modes(name):
    call = draw_call(name, B=1, T=4, H=1, G=1, K=2, V=2)
    for form in forms(registry.get(name), (2,)):

        def loss(k, form=form):
            return of_keys(call, **form)(k).square().sum()

        want = torch.func.jacrev(torch.func.jacrev(loss))(call.k)
        assert_close(torch.func.hessian(loss)(call.k), want, DOUBLE, "gradients", f"{form} hessian")
        assert_close(torch.autograd.functional.hessian(loss, call.k), want, DOUBLE, "gradients", f"{form} eager")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_attention_has_second_derivatives_where_its_fast_kernel_has_none(dtype):
    call = draw_call("softmax_attention", K=8, V=8, dtype=dtype).tracked()
    slopes = []
    for form in ("recurrent", "chunk"):
        (first,) = torch.autograd.grad(call.run(form=form)[0].square().sum(), call.q, create_graph=True)
        slopes.append(torch.autograd.grad(first.square().sum(), list(call.tensors().values())))
    for got, want in zip(*reversed(slopes), strict=True):
        assert_close(got, want, dtype, "gradients")


def test_states_load_with_torchs_defaults(tmp_path):
    for name in NAMES:
        _, state = draw_call(name).run()
        torch.save(state, tmp_path / "state.pt")
        loaded = torch.load(tmp_path / "state.pt")
        rule = registry.get(name)
        for got, want in zip(rule.state_tensors(loaded), rule.state_tensors(state), strict=True):
            assert torch.equal(got, want)
    with pytest.raises(ValueError, match="the initial state must have shape"):
        ops.delta_rule(
            *(torch.zeros(1, 2, 1, 3),) * 3, beta=torch.zeros(1, 2, 1), initial_state=torch.zeros(2, 1, 3, 3)
        )
