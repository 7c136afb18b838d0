"""Every layer in every variant, small, in float64, with all parameters drawn anew."""

import pytest
import torch

from innerloop import nn

D = 12

# Sizes that could be mistaken for each other differ: K=5, V=3, H=2, G=4.
SIZES = {"heads": 2, "key_width": 5, "value_width": 3}

DEFAULTS = {
    "GatedDeltaNet": {"heads": 2},
}

VARIANTS = {
    "GatedDeltaNet-qwen": SIZES | {"variant": "qwen", "value_heads": 4},
    "GatedDeltaNet-olmo": SIZES | {"variant": "olmo"},
    "GatedDeltaNet-bare": SIZES | {"taps": 0, "output_gate": False, "allow_neg_eigval": True},
}


def make(name, *, wide=False):
    """Return a layer as its constructor makes it; a wide one has heads enough for statistics."""
    kwargs = dict(DEFAULTS.get(name, VARIANTS.get(name)))
    if wide and "heads" in kwargs:
        kwargs |= {"heads": 16} | ({"value_heads": 32} if "value_heads" in kwargs else {})
    return getattr(nn, name.partition("-")[0])(64 if wide else D, **kwargs)


def build(name, dtype=torch.float64, seed=0):
    """Return a layer whose parameters are all random: an option that is ignored at its start is seen."""
    layer = make(name)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * (p.shape[-1] ** -0.5 + 0.2))
    return layer.to(dtype)


def tokens(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.fixture(scope="session")
def kit():
    """What tests build with; test files cannot import each other."""

    class Kit:
        width = D
        defaults = DEFAULTS
        make = staticmethod(make)
        build = staticmethod(build)
        tokens = staticmethod(tokens)

    return Kit


@pytest.fixture(params=[*DEFAULTS, *VARIANTS])
def name(request):
    """Every layer and variant."""
    return request.param


@pytest.fixture(params=DEFAULTS)
def plain(request):
    """Every layer as it comes."""
    return request.param


@pytest.fixture
def layer(name):
    return build(name)
