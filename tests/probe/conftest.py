"""A file of layers as a user writes it."""

import pytest

OWN = '''
import torch
from torch import nn
from innerloop.recipe import GradientStep, LinearMap, Recipe, Uniform

class Mean(nn.Module):
    """The mean of all tokens so far, without a state."""
    def __init__(self, width):
        super().__init__()
        self.out = nn.Linear(width, width)
    def forward(self, x):
        return self.out(x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None])

class Recurrent(nn.Module):
    """A plain RNN, which counts parity."""
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.rnn = heads, nn.RNN(width, width, batch_first=True)
    def forward(self, x):
        return self.rnn(x)

def made(width):
    return nn.Linear(width, width)

step = Recipe(Uniform(), LinearMap(), GradientStep(rate=None))

class Narrow(nn.Linear):
    def __init__(self, width):
        super().__init__(width, width - 1)

class Broken(nn.Module):
    def __init__(self, width):
        raise RuntimeError("no such width\\nsecond line")

class Silent(nn.Module):
    def __init__(self, width):
        super().__init__()
    def forward(self, x):
        return None

number = 3
'''


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN, "utf-8")
    return path
