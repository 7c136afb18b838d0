"""What decides how much a memory keeps and writes: computed wide, started as published, left alone by weight decay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from innerloop.kernels.portable import full_precision
from innerloop.shapes import compute_dtype

Dt = Literal["log-uniform", "ones"]
"""How ``dt_bias`` starts: softplus of it log-uniform in [1e-3, 0.1], or all of it 1."""


class Wide(nn.Module):
    """A module some of whose parameters stay float32 when the model becomes bfloat16 or float16.

    One step of an optimizer is too small to change a logarithm of a decay in half precision, and a decay near 1 rounds
    to 1. The same parameters are marked ``_no_weight_decay``: pulled to 0, they would mean another decay.
    """

    wide: ClassVar[tuple[str, ...]] = ()
    """Their names."""
    spared: ClassVar[tuple[str, ...]] = ()
    """Names of others that no weight decay touches."""

    def _mark(self) -> None:
        for name in self.wide:
            parameter = self._parameters.get(name)
            if parameter is not None:
                parameter._no_weight_decay = True  # pyright: ignore[reportAttributeAccessIssue]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Wide:
        kept = [p for p in (self._parameters.get(name) for name in self.wide) if p is not None]
        kept_ids = {id(x) for p in kept for x in (p, p.grad) if x is not None}

        def apart(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            if id(tensor) in kept_ids and out.dtype in (torch.bfloat16, torch.float16):
                return tensor.to(out.device, torch.float32)
            return out

        return super()._apply(apart, recurse)


def wide_empty(*shape: int) -> Tensor:
    """Return room for a parameter that is float32 where new ones are half (float64 where they are float64)."""
    return torch.empty(shape, dtype=compute_dtype(torch.get_default_dtype()))


class GateProjection(Wide, nn.Linear):
    """A linear map to gates, computed in float32 (float64 for float64) under autocast and in half models too.

    ``start`` adds an offset that begins there; it is no bias of a Linear, which foreign initialisations set to 0.
    """

    wide = ("offset",)

    def __init__(self, inputs: int, outputs: int, *, start: float | None = None) -> None:
        """Draw the weights."""
        self.start = start
        nn.Module.__init__(self)
        nn.Linear.__init__(self, inputs, outputs, bias=False)
        self.offset = None if start is None else nn.Parameter(wide_empty(outputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew; the offset begins at its start."""
        nn.Linear.reset_parameters(self)
        if self.start is not None and "offset" in self._parameters:
            nn.init.constant_(self.offset, self.start)  # pyright: ignore[reportArgumentType]
            self._mark()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., D]`` to wide ``[..., outputs]``."""
        dtype = compute_dtype(x.dtype)
        with full_precision(x):
            return F.linear(x.to(dtype), self.weight.to(dtype), None if self.offset is None else self.offset.to(dtype))


def narrow_gates(inputs: int, rank: int, outputs: int, *, start: float | None = None) -> nn.Sequential:
    """Return a map to gates through fewer channels."""
    return nn.Sequential(GateProjection(inputs, rank), GateProjection(rank, outputs, start=start))


class Decay(Wide):
    r"""The log decay of Mamba-2 and of what came after it.

    .. math:: g = -e^{A} \, \mathrm{softplus}(a + b)

    With ``lower_bound`` L instead :math:`g = L \, \sigma(e^{A} (a + b))`, which no channel can exceed.
    """

    wide = ("A_log", "dt_bias")

    def __init__(
        self,
        heads: int,
        channels: int | None = None,
        *,
        rates: tuple[float, float] = (0.01, 16.0),
        dt: Dt = "log-uniform",
        lower_bound: float | None = None,
    ) -> None:
        """Draw A uniform in ``rates``, one a head, and the bias, one a head or a channel of it."""
        super().__init__()
        if dt not in ("log-uniform", "ones"):
            raise ValueError(f"dt must be 'log-uniform' or 'ones'; got {dt!r}")
        if lower_bound is not None and not lower_bound < 0:
            raise ValueError(f"lower_bound must be below 0, a log decay; got {lower_bound}")
        self.rates, self.dt, self.lower_bound = rates, dt, lower_bound
        self.A_log = nn.Parameter(wide_empty(heads))
        self.dt_bias = nn.Parameter(wide_empty(heads) if channels is None else wide_empty(heads, channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw both anew."""
        if not self.A_log.is_meta:  # there are no numbers, and torch would load its compiler to say so
            with torch.no_grad():
                self._draw()
        self._mark()

    def _draw(self) -> None:
        self.A_log.uniform_(*self.rates).log_()
        if self.dt == "ones":
            self.dt_bias.fill_(1)
        else:
            step = self.dt_bias.uniform_(math.log(1e-3), math.log(0.1)).exp()
            self.dt_bias.copy_(inverse_softplus(step))

    def forward(self, a: Tensor) -> Tensor:
        """Map ``[..., H]`` or ``[..., H, K]`` to log decays of that shape, at most 0."""
        if self.lower_bound is None:
            return self.step_and_decay(a)[1]
        rate, raised = self._rate_and_raised(a)
        return self.lower_bound * torch.sigmoid(rate * raised)

    def step_and_decay(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """Return softplus(a + b), by which Mamba-2 also writes, and the log decay."""
        rate, raised = self._rate_and_raised(a)
        step = F.softplus(raised)
        return step, -rate * step

    def _rate_and_raised(self, a: Tensor) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(a.dtype)
        rate = self.A_log.to(dtype).exp()
        return rate if self.dt_bias.ndim == 1 else rate[:, None], a.to(dtype) + self.dt_bias.to(dtype)


class Scalars(Wide):
    """Learned numbers that begin at one value and are used wide."""

    wide = ("value",)

    def __init__(self, *shape: int, start: float) -> None:
        """Begin at ``start``."""
        super().__init__()
        self.start = start
        self.value = nn.Parameter(wide_empty(*shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Begin anew."""
        nn.init.constant_(self.value, self.start)
        self._mark()

    def forward(self) -> Tensor:
        """Return them."""
        return self.value.to(compute_dtype(self.value.dtype))


class InverseSoftplus(Scalars):
    """Learned numbers above 0, which begin at one value and are kept as what softplus makes them of."""

    def reset_parameters(self) -> None:
        """Begin anew."""
        nn.init.constant_(self.value, self.start + math.log(-math.expm1(-self.start)))
        self._mark()

    def forward(self) -> Tensor:
        """Return them."""
        return F.softplus(super().forward())


def inverse_softplus(x: Tensor) -> Tensor:
    """Return y with softplus(y) = x, for x above 0."""
    return x + torch.log(-torch.expm1(-x))


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return a model's parameters in two groups for an optimizer: with weight decay, and without.

    Without are all that hold no matrix (norms, biases) and what sets decays, wherever in the model it is.

    Args:
        module: A layer, or a model that has some.
        weight_decay: For the matrices.

    Returns:
        Two groups as ``torch.optim.AdamW`` takes them; every parameter is in one, once.

    Example:
        >>> import torch
        >>> from innerloop import nn
        >>> groups = nn.parameter_groups(nn.GatedDeltaNet(16, heads=2), 0.1)
        >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
        [(10, 0.1), (3, 0.0)]
    """
    spared = {
        id(m._parameters.get(name)) for m in module.modules() if isinstance(m, Wide) for name in (*m.wide, *m.spared)
    }
    found: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for p in module.parameters():
        found[p.ndim < 2 or id(p) in spared].append(p)
    return [{"params": found[0], "weight_decay": weight_decay}, {"params": found[1], "weight_decay": 0.0}]
