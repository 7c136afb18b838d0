"""The Gated DeltaNet block of the documents, and the small language model they make of two of them."""

from __future__ import annotations

from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from innerloop import ops
from innerloop.nn.dropout import Dropout
from innerloop.nn.norms import RMSNorm, unit

Form = Literal["operator", "loop"]
"""How a block runs its recurrence: through the library's operator, or by the document's loop over tokens."""


class Written(NamedTuple):
    """What the recurrence takes, projected from the tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class GatedDeltaNetBlock(nn.Module):
    """Pre-norm residuals around a gated delta memory with unit keys, and around a small MLP.

    The modules stand in the document's order, so that a seed draws the document's initial weights.
    """

    def __init__(self, width: int, heads: int = 2, dropout: float = 0.0, form: Form = "operator") -> None:
        """Draw the weights; the decay gate starts by keeping most of the memory."""
        super().__init__()
        self.heads, self.form = heads, form
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.gates = nn.Linear(width, 2 * heads)
        self.norm = RMSNorm(width // heads, eps=torch.finfo(torch.float32).eps)  # torch's own choice
        self.output_gate = nn.Linear(width, width)
        self.output = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = Dropout(dropout)
        nn.init.constant_(self.gates.bias[:heads], 2.0)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[B, T, D]`` to the same shape."""
        h = self.norm1(x)
        written = self._project(h)
        if self.form == "loop":
            o = token_loop(*written)
        else:
            o, _ = ops.gated_delta_rule(written.q, written.k, written.v, g=written.g, beta=written.beta, scale=1.0)
        return self._finish(x, h, o)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Map one token ``[B, D]``, and return the memory after it, ``[B, H, K, V]``."""
        h = self.norm1(x)
        q, k, v, g, beta = self._project(h)
        o, state = ops.step("gated_delta_rule", q, k, v, state=state, g=g, beta=beta, scale=1.0)
        return self._finish(x, h, o), state

    def _project(self, h: Tensor) -> Written:
        q, k, v = self.qkv(h).unflatten(-1, (self.heads, 3, -1)).unbind(-2)
        keep, beta = self.gates(h).chunk(2, -1)
        return Written(unit(q), unit(k), v, F.logsigmoid(keep), torch.sigmoid(beta))

    def _finish(self, x: Tensor, h: Tensor, o: Tensor) -> Tensor:
        gate = self.output_gate(h).unflatten(-1, (self.heads, -1))
        x = x + self.dropout(self.output(self.norm(o, gate).flatten(-2)))
        return x + self.dropout(self.mlp(self.norm2(x)))


def token_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Run the document's loop: decay, erase and write, read, one token at a time."""
    memory = q.new_zeros(q.shape[0], *q.shape[2:], v.shape[-1])  # [B, H, K, V]
    keep, read = g.exp(), []
    for t in range(q.shape[1]):
        memory = keep[:, t, :, None, None] * memory
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", memory, k[:, t])
        memory = memory + (beta[:, t, :, None] * k[:, t])[..., None] * error[..., None, :]
        read.append(torch.einsum("bhkv,bhk->bhv", memory, q[:, t]))
    return torch.stack(read, 1)


class LanguageModel(nn.Module):
    """Embedding, blocks, a last LayerNorm, and a head of its own."""

    def __init__(
        self, vocabulary: int, width: int = 128, blocks: int = 2, heads: int = 2, dropout: float = 0.0
    ) -> None:
        """Draw the weights: the blocks first, as the document builds them, then the embedding and the head."""
        super().__init__()
        self.blocks = nn.ModuleList(GatedDeltaNetBlock(width, heads, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary)

    def set_form(self, form: Form) -> None:
        """Choose how every block runs its recurrence; the weights stay."""
        for block in self._stack():
            block.form = form

    def forward(self, tokens: Tensor) -> Tensor:
        """Return what the head reads, ``[B, T, D]``."""
        x = self.embedding(tokens)
        for block in self._stack():
            x = block(x)
        return self.norm(x)

    def empty_state(self, batch: int) -> list[Tensor]:
        """Return the blocks' memories before the first token, ``[B, H, K, V]`` each."""
        width, like = self.embedding.embedding_dim, self.embedding.weight
        heads = [block.heads for block in self._stack()]
        return [like.new_zeros(batch, count, width // count, width // count) for count in heads]

    def step(self, token: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the logits after one token ``[B]``, and the blocks' memories after it."""
        x, after = self.embedding(token), []
        for block, memory in zip(self._stack(), state, strict=True):
            x, memory = block.step(x, memory)
            after.append(memory)
        return self.head(self.norm(x)), after

    def _stack(self) -> list[GatedDeltaNetBlock]:
        return cast("list[GatedDeltaNetBlock]", list(self.blocks))
