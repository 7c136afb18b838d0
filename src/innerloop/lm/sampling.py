"""From logits to the next token."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor


class Sampling:
    """How a token is drawn: the likeliest, or by chance among the likeliest."""

    def __init__(
        self, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
    ) -> None:
        """Check what was asked for."""
        if not isinstance(temperature, Real) or not 0 <= temperature < math.inf:
            raise ValueError(f"temperature must be finite and at least 0; got {temperature!r}")
        if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
            raise ValueError(f"top_k must be a whole number of at least 1, or None; got {top_k!r}")
        if top_p is not None and (not isinstance(top_p, Real) or not 0 < top_p <= 1):
            raise ValueError(f"top_p must lie in (0, 1], or be None; got {top_p!r}")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator or None; got {type(generator).__name__}")
        self.temperature, self.top_k, self.top_p, self.generator = temperature, top_k, top_p, generator

    def __call__(self, logits: Tensor) -> Tensor:
        """Draw from ``[B, V]`` logits, and return ``[B]``."""
        if self.temperature == 0 or self.top_k == 1:
            return logits.argmax(-1)
        return torch.multinomial(self.chances(logits), 1, generator=self.generator)[:, 0]

    def chances(self, logits: Tensor) -> Tensor:
        """Return what is drawn from, ``[B, V]``, in float32 or wider."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        chances = logits.softmax(-1)
        if self.top_p is None or self.top_p >= 1:
            return chances
        ordered, order = chances.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        kept = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before < self.top_p)
        return chances.masked_fill(~kept, 0)


def last_tokens(tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return where each row's last real token stands, ``[B]``; ValueError if a row has none."""
    if attention_mask is None:
        if tokens.shape[1] == 0:
            raise ValueError("tokens must hold at least one token a row; got none")
        return torch.full((tokens.shape[0],), tokens.shape[1] - 1, device=tokens.device)
    real = attention_mask.bool()
    if not bool(real.any(1).all()):
        raise ValueError("tokens must hold at least one real token a row; a row of attention_mask is all 0")
    place = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.where(real, place, -1).amax(1)
