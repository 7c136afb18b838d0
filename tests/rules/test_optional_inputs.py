"""Derivatives with every optional input on and off, and at lengths that no chunk divides."""

from itertools import product

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from innerloop import rule as registry
from innerloop import rules
from innerloop.testing import assert_close, draw_call, forms, gradients, outcome

NAMES = [module.RULE.name for module in rules.ALL]
BOUNDS = [0, 0, 4, 5, 7]


def variants(name):
    """Yield calls with every choice of initial state, optional gates and packing, and of what else a call may say."""
    rule = registry.get(name)
    gates = [()] if not any(gate.optional for gate in rule.gates) else [(), *_left_out(rule)]
    for state, omitted, scale, l2norm, packed in product(
        (True, False), gates, (None, 0.7), (False, True), (False, True)
    ):
        call = draw_call(name, B=1, T=7, H=1, G=2, K=3, V=2)
        if state:
            call.state = draw_call(name, B=len(BOUNDS) - 1 if packed else 1, H=1, G=2, K=3, V=2, state=True).state
        call.gates = {key: x for key, x in call.gates.items() if key not in omitted}
        call.options |= {"scale": scale, "use_qk_l2norm_in_kernel": l2norm}
        if packed:
            call.options["cu_seqlens"] = torch.tensor(BOUNDS)
        yield call.tracked()


def _left_out(rule):
    """Return each optional gate alone, and all of them."""
    optional = [gate.name for gate in rule.gates if gate.optional]
    return {*((name,) for name in optional), tuple(optional)}


def of_tensors(call, form):
    names = list(call.tensors())

    def function(*tensors):
        given = dict(zip(names, tensors, strict=True))
        return tuple(outcome(call.rule, call.map(lambda name, _: given[name]).run(**form)).values())

    return function, tuple(call.tensors().values())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_derivatives_of_both_orders_with_every_optional_input_on_and_off(name):
    count = 0
    for call in variants(name):
        for form in forms(call.rule, (4,)):
            function, tensors = of_tensors(call, form)
            assert gradcheck(function, tensors, fast_mode=True), (form, call.options)
            assert gradgradcheck(function, tensors, fast_mode=True), (form, call.options)
            count += 1
    assert count >= 16 * (1 + call.rule.has_chunk)


@pytest.mark.parametrize("name", NAMES)
def test_forms_agree_with_every_optional_input_on_and_off(name):
    for call in variants(name):
        want = call.run(form="recurrent")
        values, slopes = outcome(call.rule, want), gradients(call, want)
        assert values["o"].shape[1] == 7
        if not call.rule.has_chunk:
            continue
        got = call.run(form="chunk", chunk_size=3)
        assert_close(outcome(call.rule, got), values, torch.float64, what=str(call.options))
        assert_close(gradients(call, got), slopes, torch.float64, "gradients", str(call.options))


@pytest.mark.parametrize("name", [name for name in NAMES if registry.get(name).has_chunk])
def test_the_tail_of_the_last_chunk_has_its_gradient_and_reads_nothing_behind_it(name):
    for length in (65, 70, 127):
        drawn = draw_call(name, B=1, T=length, H=1, G=1, K=3, V=2, state=True)
        axes = {**drawn.rule.axes, **{gate.name: gate.axes for gate in drawn.rule.gates}}
        call = drawn.map(lambda key, x, axes=axes: _amid_junk(x) if "T" in axes.get(key, ()) else x.clone())
        call = call.map(lambda _, x: x.detach().requires_grad_())
        want = drawn.tracked()
        truth = want.run(form="recurrent")
        slopes = gradients(want, truth)
        for form in list(forms(call.rule, (64,)))[1:]:
            function, tensors = of_tensors(call, form)
            assert gradcheck(function, tensors, fast_mode=True), length
            got = call.run(**form)
            assert_close(outcome(call.rule, got), outcome(call.rule, truth), torch.float64, what=f"T={length}")
            assert_close(gradients(call, got), slopes, torch.float64, "gradients", f"T={length}")


def _amid_junk(x):
    """Return ``x`` as a view of memory that holds NaN on both sides of it."""
    around = torch.full((x.shape[0], x.shape[1] + 10, *x.shape[2:]), torch.nan, dtype=x.dtype)
    around[:, 5:-5] = x
    return around[:, 5:-5]
