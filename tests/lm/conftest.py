"""Small models with random parameters, in float64."""

import pytest
import torch

from innerloop.lm import Config, LanguageModel
from innerloop.lm.kinds import KINDS

WORDS = 23

PATTERNS = {kind: f"2*{kind}" for kind in KINDS} | {
    "window": "attention(window=3)+attention(window=1)",
    "hybrid": "gated_delta_rule+attention+rwkv7+rwkv7",
}


def build(pattern, dtype=torch.float64, seed=0, **options):
    """Return a model whose parameters are all random: an option that is ignored at its start is seen."""
    options = {"width": 12, "heads": 2, "initial_std": 0.5} | options
    model = LanguageModel(Config(vocab_size=WORDS, pattern=PATTERNS.get(pattern, pattern), **options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * (p.shape[-1] ** -0.5 + 0.2))
    return model.to(dtype).eval()


def words(*shape, seed=1):
    return torch.randint(WORDS, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def kit():
    """What tests build with; test files cannot import each other."""

    class Kit:
        vocabulary = WORDS
        patterns = PATTERNS
        build = staticmethod(build)
        words = staticmethod(words)

    return Kit


@pytest.fixture(params=PATTERNS)
def pattern(request):
    """Every kind of layer, twice, and mixtures."""
    return request.param
