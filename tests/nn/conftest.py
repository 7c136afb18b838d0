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
    "TitansLinear-slow": SIZES | {"rate_max": 0.5, "output_gate": False, "value_heads": 4, "bounded": False},
    "Longhorn-diagonal": {"diagonal": True, "key_width": 5},
    "RWKV7-last": {"heads": 2, "key_width": 5, "value_width": 3},
}

# Memories that are networks. Small mini-batches, so that short sequences cross several.
NETWORKS = {
    "TTT": {"heads": 2, "mini_batch": 4},
    "TTT-mlp": {"heads": 2, "key_width": 4, "memory": "mlp", "mini_batch": 3, "output_gate": True},
    "Titans": {"heads": 2, "key_width": 5, "mini_batch": 4},
    "Titans-deep": {"heads": 2, "depth": 3, "expansion": 1, "mini_batch": 3, "normalize_step": False, "taps": 0},
    "Titans-mac": {"heads": 2, "key_width": 4, "variant": "mac", "mini_batch": 4, "persistent": 3},
    "Titans-mag": {"heads": 2, "variant": "mag", "mini_batch": 4, "window": 3, "persistent": 0},
    "Titans-mal": {"heads": 2, "variant": "mal", "mini_batch": 5, "window": 4, "normalize_v": False},
    "Hope": {"heads": 2, "mini_batch": (4, 3), "periods": (2, 3)},
    "Hope-mlp": {"heads": 2, "memory": "mlp", "mini_batch": (4, 4), "periods": (), "taps": 0},
    "Hope-before": {"heads": 2, "memory": "mlp", "read": "before", "mini_batch": (1, 1), "periods": (3,)},
    "CMS": {"periods": (1, 3, 4), "expansion": 1},
}


def _own_names(metafunc):
    """Return what a test's own marks parametrize."""
    return [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]


def pytest_generate_tests(metafunc):
    """Give ``name`` every layer and variant; networks where it is not about gates of matrices and compilers."""
    if "name" in metafunc.fixturenames and "name" not in _own_names(metafunc):
        module = metafunc.module.__name__
        known = NETWORKS if module.endswith("test_networks") else DEFAULTS | VARIANTS
        metafunc.parametrize("name", [*known, *(NETWORKS if module.endswith("test_contract") else ())])


def make(name, *, wide=False):
    """Return a layer as its constructor makes it; a wide one has heads enough for statistics."""
    kwargs = dict((DEFAULTS | VARIANTS | NETWORKS)[name])
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
        networks = NETWORKS
        make = staticmethod(make)
        build = staticmethod(build)
        tokens = staticmethod(tokens)

    return Kit


@pytest.fixture(params=DEFAULTS)
def plain(request):
    """Every layer as it comes."""
    return request.param


@pytest.fixture
def layer(name):
    return build(name)
