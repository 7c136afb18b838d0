"""The HOPE block of the documents: one matrix memory that is written by its own projections."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from innerloop import ops
from innerloop.kernels.parts import convolve
from innerloop.nn.norms import unit


class HopeBlock(nn.Module):
    """Embed, mix neighbours, write every token into the memory, answer from what the last one reads.

    The modules stand in the document's order, so that a seed draws the document's initial weights.
    """

    def __init__(
        self, tokens: int, answers: int, width: int = 48, *, memory: bool = True, convolved: bool = True,
        self_made: bool = True, key_width: int | None = None,
    ) -> None:  # fmt: skip
        """Draw the weights.

        Without ``memory`` the last query goes straight to the feed-forward block; unless ``convolved`` tokens see no
        neighbours; unless ``self_made`` the value itself is the memory's target; keys may be narrower than the rest.
        """
        super().__init__()
        self.memory, self.convolved, self.self_made = memory, convolved, self_made
        inner = width if key_width is None else key_width
        self.embedding = nn.Embedding(tokens, width)
        self.convolution = nn.Conv1d(width, width, 4, groups=width, padding=3)
        self.key, self.value, self.query = (nn.Linear(width, size, bias=False) for size in (inner, width, inner))
        self.rate, self.keep = nn.Linear(width, 1), nn.Linear(width, 1)
        self.target = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.head = nn.Linear(width, answers)

    def forward(self, sequence: Tensor) -> Tensor:
        """Return the logits of the answer to the last token of ``sequence`` ``[B, T]``."""
        x = self._seen(sequence)
        read = self._remember(x) if self.memory else self._answer_query(x)
        return self.head(self.feed_forward(read))

    def gates(self, sequence: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rate and what is kept at every token, ``[B, T]``."""
        x = self._seen(sequence)
        return torch.sigmoid(self.rate(x))[..., 0], torch.sigmoid(self.keep(x))[..., 0]

    def _seen(self, sequence: Tensor) -> Tensor:
        x = self.embedding(sequence)
        if not self.convolved:
            return x
        # The same sums as the module's own, in a third of its time at this size.
        weight, before = self.convolution.weight[:, 0], x.new_zeros(x.shape[0], 3, x.shape[2])
        return x + convolve(x, before, weight, self.convolution.bias, None, silu=False)[0]

    def writes(self, sequence: Tensor) -> dict[str, Any]:
        """Return what the memory is given for ``sequence`` ``[B, T]``, by the names that the rule has for it."""
        return self._written(self._seen(sequence))

    def _written(self, x: Tensor) -> dict[str, Any]:
        # One product for all maps of x: at this size each costs more than its arithmetic.
        maps = self.query, self.key, self.value, self.rate, self.keep
        y = F.linear(x, torch.cat([linear.weight for linear in maps]))
        q, k, value, gates = y.split((*(linear.out_features for linear in maps[:3]), 2), -1)
        q, k = unit(q), unit(k)
        # The document keeps with alpha and learns with eta; we forget with alpha and learn with theta. Its update
        # takes the error at the memory before forgetting, which is the momentum rule without momentum.
        theta, keep = torch.sigmoid(gates + torch.cat((self.rate.bias, self.keep.bias))).split(1, -1)  # [B, T, 1]
        tokens = q, k, self.target(value) if self.self_made else value
        q, k, v = (tensor.unsqueeze(2) for tensor in tokens)
        return {"q": q, "k": k, "v": v, "theta": theta, "eta": torch.zeros_like(theta), "alpha": 1 - keep}

    def _remember(self, x: Tensor) -> Tensor:
        o, _ = ops.momentum_delta_rule(**self._written(x))
        return o[:, -1, 0]

    def _answer_query(self, x: Tensor) -> Tensor:
        return self.feed_forward(F.normalize(self.query(x[:, -1]), dim=-1))
