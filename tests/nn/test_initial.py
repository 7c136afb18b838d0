"""Initial values, by whatever way a layer comes to be, and what weight decay leaves alone."""

import math

import pytest
import torch
from torch.nn import functional as F

from innerloop import nn

ROUTES = ("constructor", "meta", "meta-by-module", "nested", "reset")


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
    if route == "nested":
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
    foreign = linear_weights(want) if route == "nested" else set()
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
        assert abs(step.log().mean() - math.log(1e-2)) < 0.9  # uniform would be 1.3 off


@pytest.mark.parametrize("route", ROUTES)
def test_what_a_paper_says_of_the_start_is_so(kit, route):
    def start(kind, **options):
        return made(route, lambda: getattr(nn, kind)(64, 4, **options))

    x = kit.tokens(1, 4).repeat(1, 1, 6)[..., :64].float()
    assert (0.5 < F.softplus(start("GatedDeltaNet", variant="qwen").decay.dt_bias)).all()
    titans = start("TitansLinear")
    assert titans.alpha(x * 0).sigmoid().max() < 2e-3
    assert titans.eta(x * 0).sigmoid().max() <= 0.5
    mesa = start("MesaNet")
    assert torch.allclose(mesa.ridge() + mesa.floor, torch.ones(4, 16))
    assert torch.equal(start("Mamba2").skip.value, torch.ones(4))
    rwkv = start("RWKV7", index=1, layers=4)
    slope = torch.linspace(0, 1, 64, dtype=torch.float64)
    zigzag = (torch.arange(64) % 16 - 7.5) / 7.5
    decay = -6 + 6 * slope ** (1 + (1 / 3) ** 0.3) + 0.5 + 2.5 * zigzag * zigzag.abs()
    assert torch.allclose(rwkv.decay(x)[0, 0].double(), decay, atol=1e-5)
    assert torch.allclose(rwkv.mixture.weights["w"].double(), 1 - (torch.arange(64).double() / 64) ** (0.9 * 0.75))
    assert rwkv.norm.weight.max() == rwkv.norm.weight.min() == torch.tensor(0.5**0.7)
    if route != "nested":
        assert not rwkv(x, first_value=x)[0].any()
    lone = made(route, lambda: nn.RWKV7(4, 4))
    assert all(p.isfinite().all() for p in lone.parameters())


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
