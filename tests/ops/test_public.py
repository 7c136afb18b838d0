"""Every rule's own function is ``ops.run`` with a signature written out."""

import inspect

import pytest
import torch

from innerloop import ops, rules
from innerloop import rule as registry
from innerloop.testing import draw_call

NAMES = [module.RULE.name for module in rules.ALL]
RUN = inspect.signature(ops.run).parameters
OPTIONS = [name for name, p in RUN.items() if p.kind is p.KEYWORD_ONLY]


def same(got, want, rule):
    assert torch.equal(got[0], want[0])
    assert (got[1] is None) == (want[1] is None)
    for x, y in zip(rule.state_tensors(got[1]), rule.state_tensors(want[1]), strict=True):
        assert (x is None and y is None) or torch.equal(x, y)


@pytest.mark.parametrize("name", NAMES)
def test_options_and_defaults_are_those_of_run(name):
    parameters = inspect.signature(getattr(ops, name)).parameters
    rule = registry.get(name)
    assert list(parameters)[:3] == ["q", "k", "v"]
    assert all(p.kind is p.KEYWORD_ONLY for p in list(parameters.values())[3:])
    assert {option: parameters[option].default for option in OPTIONS} == {o: RUN[o].default for o in OPTIONS}
    for gate in rule.gates:
        assert parameters[gate.name].default is (None if gate.optional else inspect.Parameter.empty)
    for constant in rule.constants:
        assert parameters[constant.name].default == constant.default
    assert set(parameters) == {"q", "k", "v", *OPTIONS, *(x.name for x in (*rule.gates, *rule.constants))}


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_handed_on(name):
    function, rule = getattr(ops, name), registry.get(name)
    call = draw_call(name, T=9, state=True)
    same(function(call.q, call.k, call.v, **call.gates), ops.run(name, call.q, call.k, call.v, **call.gates), rule)
    constants = {constant.name: 0.3 for constant in rule.constants}
    options = {"initial_state": call.state, "output_final_state": True, **call.gates, **constants}
    for form in ({"form": "recurrent"}, {"form": "chunk", "chunk_size": 4, "backend": "torch"}):
        given = {**options, **form, "scale": 0.7, "use_qk_l2norm_in_kernel": True}
        got, want = function(call.q, call.k, call.v, **given), ops.run(name, call.q, call.k, call.v, **given)
        same(got, want, rule)
        plain, _ = function(call.q, call.k, call.v, **call.gates)
        assert not torch.equal(got[0], plain)
    one = draw_call(name, B=1, T=9)
    packed = {"cu_seqlens": torch.tensor([0, 4, 9]), "output_final_state": True, **one.gates}
    same(function(one.q, one.k, one.v, **packed), ops.run(name, one.q, one.k, one.v, **packed), rule)


def test_a_chunk_size_that_no_form_can_take_is_refused_by_every_function():
    for name in NAMES:
        call = draw_call(name, T=9)
        for option, value in (("chunk_size", 0), ("form", "fast"), ("backend", "metal")):
            with pytest.raises(ValueError, match=option):
                getattr(ops, name)(call.q, call.k, call.v, **call.gates, **{option: value})
