"""The contract, over every rule of the library and one from a file outside of it."""

import importlib.util
from pathlib import Path

import pytest

from innerloop import rule as registry
from innerloop import testing

# Finite differences of the first derivative: one slow run a rule.
SLOW = {"second_derivatives_are_right"}


def _outside_rule() -> str:
    path = Path(__file__).parent / "outside_rule.py"
    spec = importlib.util.spec_from_file_location("outside_rule", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.RULE.name


NAMES = (*registry.names(), _outside_rule())
CASES = [
    pytest.param(name, check, id=f"{name}-{check.__name__}", marks=[pytest.mark.slow] if check.__name__ in SLOW else [])
    for name in NAMES
    for check in testing.CONTRACT
]


@pytest.mark.parametrize(("name", "check"), CASES)
def test_rule_holds_to_the_contract(name, check):
    check(registry.get(name))


def test_check_rule_names_the_rule_and_the_property_that_failed(monkeypatch):
    rule = registry.get("linear_attention")

    def broken(rule):
        raise AssertionError("o is off by 1")

    monkeypatch.setattr("innerloop.testing.contract.CONTRACT", (broken,))
    with pytest.raises(AssertionError, match="linear_attention: broken: o is off by 1"):
        testing.check_rule(rule)
