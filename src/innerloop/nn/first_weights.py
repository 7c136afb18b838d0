"""The learned first weights of a memory that is a network: used once, where a sequence begins."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class FirstWeights(nn.Module):
    """Matrices ``[heads, in, out]`` from one width to the next, normal with variance 1 / in, or another spread.

    They are parameters of their own, not a Linear's, which foreign initialisations would draw anew.
    """

    def __init__(
        self, heads: int, widths: Sequence[int], *, spread: float | None = None, last: float = 1.0, bias: bool = False
    ) -> None:
        """Draw; ``last`` multiplies the last matrix, and a ``bias`` begins at 0 behind each."""
        super().__init__()
        self.spread, self.last = spread, last
        sizes = list(pairwise(widths))
        self.matrices = nn.ParameterList(nn.Parameter(torch.empty(heads, a, b)) for a, b in sizes)
        self.biases = nn.ParameterList(nn.Parameter(torch.empty(heads, b)) for _, b in sizes if bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw anew."""
        for number, matrix in enumerate(self.matrices):
            spread = matrix.shape[-2] ** -0.5 if self.spread is None else self.spread
            if matrix.is_meta:
                continue  # torch would load its compiler to draw none
            nn.init.normal_(matrix, std=spread * (self.last if number + 1 == len(self.matrices) else 1.0))
        for bias in self.biases:
            nn.init.zeros_(bias)

    def forward(self) -> tuple[Tensor, ...]:
        """Return (W1, W2, ...), or (W1, b1, W2, b2, ...)."""
        if not self.biases:
            return tuple(self.matrices)
        return tuple(x for pair in zip(self.matrices, self.biases, strict=True) for x in pair)
