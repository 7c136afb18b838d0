"""Every layer in every variant, small, in float64, with all parameters drawn anew."""

import pytest
import torch

from innerloop import nn

D = 12

# Sizes that could be mistaken for each other differ: K=5, V=3, H=2, G=4.
SIZES = {"heads": 2, "key_width": 5, "value_width": 3}

DEFAULTS = {
    "GatedDeltaNet": {"heads": 2},
    "DeltaNet": {"heads": 2},
    "KimiDeltaAttention": {"heads": 2},
    "GatedDeltaNet2": {"heads": 2},
    "GatedDeltaProduct": {"heads": 2},
    "GatedLinearAttention": {"heads": 2},
    "LinearAttention": {"heads": 2},
    "SoftmaxAttention": {"heads": 2},
    "RetNet": {"heads": 2},
    "Mamba2": {"heads": 2},
    "MesaNet": {"heads": 2},
    "TitansLinear": {"heads": 2},
    "Longhorn": {"heads": 2},
    "RWKV7": {"heads": 2},
}

VARIANTS = {
    "GatedDeltaNet-qwen": SIZES | {"variant": "qwen", "value_heads": 4},
    "GatedDeltaNet-olmo": SIZES | {"variant": "olmo"},
    "GatedDeltaNet-bare": SIZES | {"taps": 0, "output_gate": False, "allow_neg_eigval": True},
    "DeltaNet-gated": SIZES | {"output_gate": True, "allow_neg_eigval": True, "value_heads": 4},
    "KimiDeltaAttention-bounded": SIZES | {"lower_bound": -5.0, "allow_neg_eigval": True, "value_heads": 4},
    "GatedDeltaNet2-silu": SIZES | {"activation": "silu", "allow_neg_eigval": True, "value_heads": 4},
    "GatedDeltaProduct-three": SIZES | {"steps": 3, "allow_neg_eigval": False, "value_heads": 4},
    "GatedDeltaProduct-keeps": SIZES | {"forget_gate": False, "output_gate": False},
    "GatedLinearAttention-groups": SIZES | {"rank": 3, "temperature": 2.0, "value_heads": 4},
    "LinearAttention-groups": SIZES | {"value_heads": 4},
    "SoftmaxAttention-shared": {"heads": 4, "key_heads": 2, "key_width": 6, "value_width": 3, "key_norm": True},
    "SoftmaxAttention-anywhere": {"heads": 2, "key_width": 5, "rotary_base": None},
    "SoftmaxAttention-window": {"heads": 4, "key_heads": 2, "key_width": 6, "value_width": 3, "window": 4},
    "RetNet-groups": {"heads": 2, "key_width": 6, "value_width": 3, "value_heads": 4},
    "Mamba2-groups": {"heads": 4, "groups": 2, "key_width": 5, "value_width": 3},
    "MesaNet-gated": SIZES | {"output_gate": True, "value_heads": 4},
    "TitansLinear-slow": SIZES | {"rate_max": 0.5, "output_gate": False, "value_heads": 4},
    "Longhorn-diagonal": {"diagonal": True, "key_width": 5},
    "RWKV7-last": {"heads": 2, "key_width": 5, "value_width": 3},
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
