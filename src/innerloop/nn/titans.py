"""Titans: a deep memory that learns while it runs, alone or beside attention."""

from __future__ import annotations

from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from innerloop import ops
from innerloop.algebra.self_modifying import unit
from innerloop.arguments import check_choice, check_count, check_flags, check_positive
from innerloop.nn.first_weights import FirstWeights
from innerloop.nn.gates import GateProjection
from innerloop.nn.layer import Layer, Turn
from innerloop.nn.norms import RMSNorm
from innerloop.nn.projections import Projection, heads, width_of_heads
from innerloop.nn.segments import SegmentMemory
from innerloop.nn.streams import Streams
from innerloop.nn.window_attention import WindowAttention

Variant = Literal["memory", "mac", "mag", "mal"]


class MemoryGates(nn.Module):
    r"""A rate, a momentum and a forgetting for every token and head, bounded so that a repeated token cannot explode.

    .. math::
        \eta = \eta_{\max} \sigma(\cdot), \qquad \theta = \frac{r (1 - \eta)}{C} \sigma(\cdot), \qquad
        \alpha = \sigma(\cdot - 9)
    """

    def __init__(self, width: int, heads: int, mini_batch: int, rate: float, momentum_max: float) -> None:
        """Draw the weights."""
        super().__init__()
        check_positive("rate", rate)
        if isinstance(momentum_max, bool) or not isinstance(momentum_max, Real) or not 0 <= momentum_max < 1:
            raise ValueError(f"momentum_max must lie in [0, 1); got {momentum_max!r}")
        self.largest, self.momentum_max = rate / mini_batch, momentum_max
        self.theta, self.eta = GateProjection(width, heads, start=0.0), GateProjection(width, heads, start=0.0)
        self.alpha = GateProjection(width, heads, start=-9.0)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return the gates by name, ``[..., H]``."""
        eta = self.momentum_max * self.eta(x).sigmoid()
        theta = self.largest * (1 - eta) * self.theta(x).sigmoid()
        return {"theta": theta, "eta": eta, "alpha": self.alpha(x).sigmoid()}


class Titans(Layer):
    r"""A network that learns the tokens by gradient descent with momentum and forgetting, and attention around it.

    ``"memory"`` is the memory alone. ``"mac"``, memory as context: attention inside segments over learned tokens, what
    the memory of the segment's start recalls, and the segment; its output y is written, and gated by what the memory
    then says to it. ``"mag"``: attention over a sliding window, gated by the memory. ``"mal"``: the memory, then the
    sliding window. Behrouz et al. (2024), arXiv:2501.00663.

    From the paper: the variants, SiLU and convolutions on q, k, v, unit queries and keys, gates by token, momentum and
    forgetting. Ours: forgetting that begins at 1e-4 (published ports begin near 1/2, and are empty after 16 tokens),
    rates of at most ``(1 - eta) / mini_batch``, unit values and steps damped by a bound on the curvature, without which
    a repeated token diverges. ``normalize_v=False, normalize_step=False`` and a larger ``rate`` are the published form.

    Args:
        width: Of the model, D.
        heads: H, each with a memory of its own.
        key_width: Of a head, K; D / H if None.
        variant: ``"memory"``, ``"mac"``, ``"mag"`` or ``"mal"``.
        depth: Layers of the memory.
        expansion: Its hidden channels, as a multiple of K.
        mini_batch: Tokens whose gradients are taken at the same weights; the segment of ``"mac"``.
        rate: The largest rate times ``mini_batch / (1 - eta)``.
        momentum_max: The largest momentum.
        taps: Of the convolutions; 0 leaves them out. ``"mac"`` writes what attention has mixed, and has none.
        window: Of the sliding attention.
        persistent: Learned tokens that attention always sees.
        normalize_v: Whether values are made unit length.
        normalize_step: Whether steps are damped.
        stop_gradient_writes: Take what is written as given: the outer gradient reaches queries, first weights and what
            follows.

    Raises:
        ValueError: If sizes do not divide, or an option is unknown.

    Example:
        >>> import torch
        >>> from innerloop import nn
        >>> y, state = nn.Titans(32, heads=2, variant="mag")(torch.randn(3, 20, 32))
        >>> y.shape, [w.shape for w in state.memory.weights]
        (torch.Size([3, 20, 32]), [torch.Size([3, 2, 16, 64]), torch.Size([3, 2, 64, 16])])
    """

    rule = "titans"

    def __init__(
        self,
        width: int,
        heads: int = 4,
        *,
        key_width: int | None = None,
        variant: Variant = "memory",
        depth: int = 2,
        expansion: int = 4,
        mini_batch: int = 64,
        rate: float = 1.0,
        momentum_max: float = 0.9,
        taps: int = 4,
        window: int = 64,
        persistent: int = 4,
        normalize_v: bool = True,
        normalize_step: bool = True,
        stop_gradient_writes: bool = False,
    ) -> None:
        """Draw the weights."""
        super().__init__(width)
        check_choice("variant", variant, get_args(Variant))
        counts = {"depth": depth, "expansion": expansion, "mini_batch": mini_batch, "window": window}
        for name, value in counts.items():  # what a variant has no use for must have a meaning all the same
            check_count(name, value)
        for name, value in (("taps", taps), ("persistent", persistent)):
            check_count(name, value, 0)
        check_flags(
            normalize_v=normalize_v, normalize_step=normalize_step, stop_gradient_writes=stop_gradient_writes
        )
        K = width_of_heads(width, heads, key_width)
        self.heads, self.variant, self.mini_batch = heads, variant, mini_batch
        self.normalize_v, self.normalize_step = normalize_v, normalize_step
        self.stop_gradient_writes = stop_gradient_writes
        self.first = FirstWeights(heads, (K, *(expansion * K,) * (depth - 1), K))
        self.norm = RMSNorm(K)
        self.output = Projection(heads * K, width)
        inner = heads * K if variant == "mac" else width
        self.gates = MemoryGates(inner, heads, mini_batch, rate, momentum_max)
        if variant == "mac":
            self.segments = SegmentMemory(width, heads, K, mini_batch, persistent)
        else:
            self.streams = Streams(width, {"query": heads * K, "key": heads * K, "value": heads * K}, taps)
        if variant in ("mag", "mal"):
            self.attention = WindowAttention(width, heads, K, window, persistent)
            self.attention_norm = RMSNorm(K)
        if variant == "mal":
            self.between = Projection(heads * K, width)

    def mix(self, x: Tensor, turn: Turn) -> Tensor:
        """Run the paper's layer."""
        if self.variant == "mac":
            return self.output(self.norm(self.segments(x, turn, self)).flatten(-2))
        o = self.norm(self._recall(x, turn))
        if self.variant == "mag":
            y = self.attention_norm(heads(self.attention(x, turn), self.heads))
            o = y * torch.sigmoid(o)
        elif self.variant == "mal":
            o = self.attention_norm(heads(self.attention(self.between(o.flatten(-2)), turn), self.heads))
        return self.output(o.flatten(-2))

    def _recall(self, x: Tensor, turn: Turn) -> Tensor:
        q, k, v = (heads(y, self.heads) for y in self.streams(x, turn))
        q, k, v, gates = self.written(q, k, v, self.gates(x))
        return turn.learn(
            ops.titans, q, k, v, theta=gates["theta"], eta=gates["eta"], alpha=gates["alpha"], weights=self.first(),
            mini_batch=self.mini_batch, normalize_step=self.normalize_step,
        )  # fmt: skip

    def written(
        self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """Return what the memory is given: at unit length, and as data if no gradient goes through writes."""
        q, k = unit(q), unit(k)
        v = unit(v) if self.normalize_v else v
        q, k = q.to(v.dtype), k.to(v.dtype)
        if self.stop_gradient_writes:
            k, v, gates = k.detach(), v.detach(), {name: gate.detach() for name, gate in gates.items()}
        return q, k, v, gates
