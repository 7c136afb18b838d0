"""Train a small language model on windows of one text, as the documents do, and let it write."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from innerloop.data import Tokenizer, Windows
from innerloop.experiments.blocks.gated_delta_net import LanguageModel
from innerloop.experiments.blocks.head_loss import head_loss

BATCH = 1024
RATE = 3e-4
CLIP = 1.0
_PIECE = 64
"""Windows at once, whose gradients are summed over a batch: what stays near the caches, and the token loop, which keeps
every token's memory, has room for."""


class Step(NamedTuple):
    """One update."""

    loss: float
    """Mean over tokens, before the update."""
    seconds: float


class Learner:
    """A model and the optimizer that trains it."""

    def __init__(self, model: LanguageModel) -> None:
        """Start at the model's weights with fresh moments."""
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=RATE)

    def update(self, batch: Tensor) -> Step:
        """Take one step on windows ``[B, length + 1]``, gradients clipped to a norm of 1."""
        start = time.perf_counter()
        self.model.train()
        self.optimizer.zero_grad()
        tokens, total = batch[:, 1:].numel(), 0.0
        for piece in batch.split(_PIECE):
            loss = summed_loss(self.model, piece)
            (loss / tokens).backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return Step(total / tokens, time.perf_counter() - start)

    def tensors(self) -> dict[str, Tensor]:
        """Name all that the next update depends on, dropout apart."""
        weights = {f"weight.{name}": x for name, x in self.model.state_dict().items()}
        moments = self.optimizer.state_dict()["state"].items()
        return weights | {f"moment.{i}.{name}": x for i, found in moments for name, x in found.items()}

    def put(self, tensors: dict[str, Tensor]) -> None:
        """Go on from where :meth:`tensors` was called."""
        state = self.optimizer.state_dict()
        state["state"] = {}
        for name, x in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "moment":
                number, _, moment = rest.partition(".")
                state["state"].setdefault(int(number), {})[moment] = x
        self.optimizer.load_state_dict(state)
        weights = {name.removeprefix("weight."): x for name, x in tensors.items() if name.startswith("weight.")}
        self.model.load_state_dict(weights)


def summed_loss(model: LanguageModel, windows: Tensor) -> Tensor:
    """Return the cross entropy of each window's tokens given those before, summed."""
    read = model(windows[:, :-1])
    return head_loss(read.flatten(0, 1), model.head.weight, model.head.bias, windows[:, 1:].flatten())


@torch.no_grad()
def mean_loss(model: LanguageModel, windows: Tensor) -> float:
    """Return the cross entropy a token over all ``windows``, without dropout."""
    model.eval()
    total = sum(summed_loss(model, piece).item() for piece in windows.split(_PIECE))
    return total / windows[:, 1:].numel()


def shuffled(windows: Windows) -> list[Tensor]:
    """Return the indices of each batch of an epoch, in an order drawn from the global generator."""
    return list(torch.randperm(len(windows.train)).split(BATCH))


@torch.no_grad()
def write(model: LanguageModel, tokenizer: Tokenizer, prompt: str, length: int, seed: int = 0) -> str:
    """Continue ``prompt`` by ``length`` tokens drawn one at a time; the memory stays as large as after the first."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    given = tokenizer.encode(prompt).tolist()
    state, logits, written = model.empty_state(1), torch.empty(0), []
    for token in given:
        logits, state = model.step(torch.tensor([token]), state)
    for _ in range(length):
        written.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
        logits, state = model.step(torch.tensor(written[-1:]), state)
    return tokenizer.decode(written)
