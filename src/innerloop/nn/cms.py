"""The continuum memory: a chain of networks that learn at different frequencies, in place of a feed-forward block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from innerloop import ops
from innerloop.arguments import check_count, check_flags
from innerloop.nn.first_weights import FirstWeights
from innerloop.nn.gates import GateProjection
from innerloop.nn.layer import Layer, Turn
from innerloop.nn.projections import Projection


class Levels(nn.Module):
    """The networks of a chain, their targets and their rates."""

    def __init__(self, width: int, periods: Sequence[int] | int, hidden: int, normalize_step: bool) -> None:
        """Draw."""
        super().__init__()
        periods = tuple(periods) if isinstance(periods, Sequence) else (periods,)
        if not periods or any(isinstance(c, bool) or not isinstance(c, int) or c < 1 for c in periods):
            raise ValueError(f"periods must be whole numbers above 0, one a level; got {periods!r}")
        self.periods, self.normalize_step = tuple(periods), normalize_step
        self.first = nn.ModuleList(FirstWeights(1, (width, hidden, width)) for _ in periods)
        self.target = Projection(width, len(periods) * width)
        self.rate = GateProjection(width, len(periods), start=-2.0)

    def forward(self, y: Tensor, x: Tensor, turn: Turn, part: str) -> Tensor:
        """Send y through the chain, whose levels learn to answer what is made of x."""
        n = len(self.periods)
        largest = torch.tensor(self.periods, dtype=torch.float64, device=x.device).reciprocal()
        rate = self.rate(x).sigmoid()
        rate = rate * largest.to(rate.dtype)
        out = turn.learn(
            ops.cms, y[:, :, None], weights=tuple(first() for first in self.first),
            target=self.target(x).unflatten(-1, (n, 1, -1)).to(y.dtype), rate=rate[..., None], periods=self.periods,
            normalize_step=self.normalize_step, part=part,
        )  # fmt: skip
        return out[:, :, 0]


class CMS(Layer):
    r"""A chain of networks that learn while they run, each at a frequency of its own.

    .. math::
        y = f_n(\dots f_1(x)), \qquad f_l(h) = h + \mathrm{gelu}(h W_1) W_2, \qquad
        \theta_l \leftarrow \theta_l - \sum_{window} \eta_l \nabla \tfrac12 |f_l(h) - x V_l|^2, \qquad
        \eta_l = \frac{\sigma(\cdot)}{C_l}

    Behrouz et al. (2025), arXiv:2512.24695: the chain, the periods, the sum over a window. Ours: the targets, rates
    that fall with the period, and steps damped by a bound on the curvature, without which a repeated token diverges.

    Args:
        width: Of the model, D.
        periods: Tokens of each level's window; one number is one level.
        expansion: Hidden channels, as a multiple of D.
        normalize_step: Whether steps are damped.

    Raises:
        ValueError: If a period or the expansion is not a whole number above 0.

    Example:
        >>> import torch
        >>> from innerloop import nn
        >>> y, state = nn.CMS(32, (1, 4, 16))(torch.randn(3, 21, 32))
        >>> y.shape, [int(state.position[0]) // period for period in (1, 4, 16)]
        (torch.Size([3, 21, 32]), [21, 5, 1])
    """

    rule = "cms"

    def __init__(
        self, width: int, periods: Sequence[int] | int = (16, 64, 256), *, expansion: int = 4,
        normalize_step: bool = True,
    ) -> None:  # fmt: skip
        """Draw the weights."""
        super().__init__(width)
        check_count("expansion", expansion)
        check_flags(normalize_step=normalize_step)
        self.levels = Levels(width, periods, expansion * width, normalize_step)

    def mix(self, x: Tensor, turn: Turn) -> Tensor:
        """Run the chain."""
        return self.levels(x, x, turn, "")
