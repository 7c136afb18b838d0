"""The contract of rules whose memories are networks, over all of them."""

import pytest

from innerloop import network, testing

SLOW = {"second_derivatives_are_right"}
CASES = [
    pytest.param(name, check, id=f"{name}-{check.__name__}", marks=[pytest.mark.slow] if check.__name__ in SLOW else [])
    for name in network.names()
    for check in testing.NETWORK_CONTRACT
]


@pytest.mark.parametrize(("name", "check"), CASES)
def test_network_rule_holds_to_the_contract(name, check):
    check(network.find(name))


def test_the_contract_names_the_rule_and_the_property_that_failed(monkeypatch):
    def broken(rule):
        raise AssertionError("o is off by 1")

    monkeypatch.setattr("innerloop.testing.network_contract.NETWORK_CONTRACT", (broken,))
    with pytest.raises(AssertionError, match="titans: broken: o is off by 1"):
        testing.check_network_rule("titans")
