"""Initial values, by whatever way a layer comes to be, and what weight decay leaves alone."""

import math

import pytest
import torch
from torch.nn import functional as F

from innerloop import nn

ROUTES = ("constructor", "meta", "meta, module by module", "nested in a foreign model", "reset")


class Foreign(torch.nn.Module):
    """A model whose initialisation knows of Linear alone, as that of many a language model does."""

    def __init__(self, layer):
        super().__init__()
        self.block = torch.nn.Sequential(torch.nn.Linear(4, 4), layer)
        self.apply(self.draw)

    @staticmethod
    def draw(module):
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)


def made(route, make):
    torch.manual_seed(7)
    if route == "constructor":
        return make()
    if route.startswith("nested"):
        return Foreign(make()).block[1]
    if route == "reset":
        layer = make()
        with torch.no_grad():
            for p in layer.parameters():
                p.fill_(torch.nan)
        layer.reset_parameters()
        return layer
    with torch.device("meta"):
        layer = make()
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(torch.nan)
    if route == "meta":
        layer.reset_parameters()
    else:
        for module in layer.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return layer


def linear_weights(layer):
    linears = {name for name, module in layer.named_modules() if isinstance(module, torch.nn.Linear)}
    return {f"{name}.{kind}" for name in linears for kind in ("weight", "bias")}


@pytest.mark.parametrize("route", ROUTES[1:])
def test_initial_values_are_alike_by_every_route(kit, name, route):
    want, got = made("constructor", lambda: kit.make(name, wide=True)), made(route, lambda: kit.make(name, wide=True))
    foreign = linear_weights(want) if route.startswith("nested") else set()
    parameters = dict(want.named_parameters())
    for key, p in got.named_parameters():
        assert p.isfinite().all(), key
        if key in foreign:
            continue
        truth = parameters[key]
        assert p.dtype == truth.dtype
        spread = truth.std(correction=0).item()
        # The mean and the spread of n draws lie within five of their standard errors of each other.
        bar = 5 * spread * math.sqrt(2 / p.numel()) + 1e-7
        assert abs(p.mean() - truth.mean()) <= bar, key
        assert abs(p.std(correction=0) - spread) <= bar, key


def decays(layer):
    return [m for m in layer.modules() if type(m).__name__ == "Decay"]


@pytest.mark.parametrize("route", ROUTES)
def test_decays_begin_in_their_published_ranges(kit, plain, route):
    layer = made(route, lambda: kit.make(plain, wide=True))
    for decay in decays(layer):
        rate, step = decay.A_log.exp(), F.softplus(decay.dt_bias)
        low = 0.01 if plain in ("GatedDeltaNet", "GatedDeltaProduct") else 1.0
        assert rate.min() >= 0.99 * low
        assert rate.max() <= 16.01
        assert rate.max() - rate.min() > 2
        assert step.min() >= 0.99e-3
        assert step.max() <= 0.1001
        assert abs(step.log().mean() - math.log(1e-2)) < 1.7  # log-uniform


def test_weights_go_out_and_in_to_the_bit(kit, layer, name):
    other = kit.build(name, seed=5)
    other.load_state_dict(layer.state_dict())
    x = kit.tokens(2, 5)
    assert torch.equal(other(x)[0], layer(x)[0])


def test_no_weight_decay_reaches_what_sets_a_decay(kit, name):
    layer = kit.build(name)
    model = torch.nn.ModuleList([layer, torch.nn.Linear(3, 3)])
    groups = nn.parameter_groups(model, 0.1)
    pulled, spared = ({id(p) for p in group["params"]} for group in groups)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert pulled | spared == {id(p) for p in model.parameters()}
    assert not pulled & spared
    for key, p in layer.named_parameters():
        last = key.rpartition(".")[2]
        if last in ("A_log", "dt_bias", "offset", "value", "bias") or "norm" in key:
            assert id(p) in spared, key
        elif last == "weight":
            assert id(p) in pulled, key
    torch.optim.AdamW(groups)


def test_marks_outlive_the_way_through_meta(kit, plain):
    def marked(layer):
        return [key for key, p in layer.named_parameters() if getattr(p, "_no_weight_decay", False)]

    assert marked(made("meta", lambda: kit.make(plain))) == marked(kit.make(plain))
