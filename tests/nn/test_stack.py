"""Layers on top of each other, as a model has them: decoding, and training in half precision."""

import pytest
import torch
from torch.nn import functional as F

from innerloop import nn
from innerloop.testing import error

MIXES = {
    "four of a kind": ("GatedDeltaNet",) * 4,
    "two of a kind": ("GatedDeltaNet",) * 2,
    "a hybrid": ("KimiDeltaAttention", "SoftmaxAttention", "Mamba2", "RetNet"),
}


class Model(torch.nn.Module):
    """Embedding, pre-normed residual layers, a head."""

    def __init__(self, kinds, tokens=17, width=16):
        super().__init__()
        self.embedding = torch.nn.Embedding(tokens, width)
        self.layers = torch.nn.ModuleList(getattr(nn, kind)(width, 2) for kind in kinds)
        self.head = torch.nn.Linear(width, tokens)

    def forward(self, ids, states=None, **options):
        x, after = self.embedding(ids), []
        for layer, state in zip(self.layers, states or [None] * len(self.layers), strict=True):
            y, state = layer(F.layer_norm(x, x.shape[-1:]), state, **options)
            x, after = x + y, [*after, state]
        return self.head(F.layer_norm(x, x.shape[-1:])), after


def model(mix, dtype=torch.float32):
    torch.manual_seed(0)
    return Model(MIXES[mix]).to(dtype)


@pytest.mark.parametrize("mix", ["four of a kind", "a hybrid"])
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
def test_the_last_token_is_the_same_after_a_prompt_and_in_one_piece(mix, dtype, bar):
    net, ids = model(mix, dtype), torch.tensor([[3, 1, 4, 1, 5]])
    want, _ = net(ids)
    _, states = net(ids[:, :4])
    last, _ = net(ids[:, 4:], states)
    assert error(last, want[:, 4:]) <= bar


@torch.no_grad()
@pytest.mark.parametrize("mix", ["four of a kind", "a hybrid"])
def test_prompts_of_different_length_go_on_as_if_alone(mix):
    net = model(mix)
    prompts = [torch.arange(3) + 2, (5 * torch.arange(9)) % 17]
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, :6] = 0
    batch = torch.stack((F.pad(prompts[0], (6, 0), value=16), prompts[1]))

    def greedy(ids, **options):
        logits, states = net(ids, **options)
        found = []
        for _ in range(10):
            found.append(logits[:, -1].argmax(-1))
            logits, states = net(found[-1][:, None], states)
        return torch.stack(found, 1), logits

    together, logits = greedy(batch, attention_mask=mask)
    for n, prompt in enumerate(prompts):
        alone, last = greedy(prompt[None])
        assert torch.equal(together[n], alone[0])
        assert error(logits[n], last[0]) <= 1e-4


def test_a_model_in_half_precision_learns_as_one_in_single():
    ids = torch.randint(17, (8, 24), generator=torch.Generator().manual_seed(1))
    ids[:, 12:] = ids[:, :12]  # the second half repeats the first

    def train(dtype):
        net = model("two of a kind", dtype)
        optimizer = torch.optim.AdamW(nn.parameter_groups(net, 0.01), lr=1e-2)
        losses = []
        for _ in range(30):
            logits, _ = net(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    single, half = train(torch.float32), train(torch.bfloat16)
    assert single[-1] < 0.6 * single[0]
    assert all(loss == loss for loss in half)
    assert abs(half[-1] - single[-1]) < 0.15 * single[0]
