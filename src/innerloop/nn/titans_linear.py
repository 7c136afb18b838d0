"""Titans with a linear memory: gradient descent with momentum and forgetting."""

from __future__ import annotations

from torch import Tensor

from innerloop import ops
from innerloop.nn.gates import GateProjection
from innerloop.nn.layer import Layer, Turn
from innerloop.nn.norms import RMSNorm
from innerloop.nn.projections import Projection, heads, value_heads_of, width_of_heads
from innerloop.nn.streams import Streams


class TitansLinear(Layer):
    r"""The momentum delta rule on unit keys, behind short convolutions and under an output gate.

    .. math::
        \eta = \sigma(W_\eta x), \qquad \theta = \theta_{\max} (1 - \eta) \sigma(W_\theta x), \qquad
        \alpha = \sigma(W_\alpha x + a), \qquad y = W_o (\mathrm{RMSNorm}(o) \circ \mathrm{SiLU}(W_z x))

    Behrouz et al. (2024), arXiv:2501.00663, with a linear memory. Ours: forgetting begins at 3e-4 a token, a half-life
    of 2,000 (at 1/2 a memory would be empty after 16), and a rate of at most ``1 - eta``. One repeated key is stable at
    any rate below ``2 (1 + eta)``, but keys that change are not: at rate 1 and momentum .8 noise overflows within 4,096
    tokens. ``bounded=False`` is the published form, without the factor.

    Args:
        width: Of the model, D.
        heads: Key heads, H.
        key_width: Of a head, K; D / H if None.
        value_width: Of a head, V; K if None.
        value_heads: G, a multiple of H; H if None.
        taps: Of the convolutions; 0 leaves them out.
        rate_max: The largest rate, in (0, 1].
        output_gate: Whether the read is gated.
        bounded: Whether momentum bounds the rate.

    Raises:
        ValueError: If sizes do not divide, or the largest rate is not in (0, 1].

    Example:
        >>> import torch
        >>> from innerloop import nn
        >>> y, state = nn.TitansLinear(32, heads=2)(torch.randn(3, 10, 32))
        >>> y.shape, state.memory.U.shape
        (torch.Size([3, 10, 32]), torch.Size([3, 2, 16, 16]))
    """

    rule = "momentum_delta_rule"

    def __init__(
        self,
        width: int,
        heads: int = 4,
        *,
        key_width: int | None = None,
        value_width: int | None = None,
        value_heads: int | None = None,
        taps: int = 4,
        rate_max: float = 1.0,
        output_gate: bool = True,
        bounded: bool = True,
    ) -> None:
        """Draw the weights."""
        super().__init__(width)
        if not 0 < rate_max <= 1:
            raise ValueError(f"rate_max must lie in (0, 1], beyond which a repeated key may diverge; got {rate_max}")
        self.heads, self.value_heads, self.rate_max = heads, value_heads_of(heads, value_heads), rate_max
        self.bounded = bounded
        K = width_of_heads(width, heads, key_width)
        V = K if value_width is None else width_of_heads(width, heads, value_width)
        G = self.value_heads
        self.streams = Streams(width, {"query": heads * K, "key": heads * K, "value": G * V}, taps)
        self.theta, self.eta = GateProjection(width, G, start=0.0), GateProjection(width, G, start=0.0)
        self.alpha = GateProjection(width, G, start=-8.0)
        self.gate = Projection(width, G * V) if output_gate else None
        self.norm = RMSNorm(V)
        self.output = Projection(G * V, width)

    def mix(self, x: Tensor, turn: Turn) -> Tensor:
        """Run the paper's layer."""
        q, k, v = self.streams(x, turn)
        q, k, v = heads(q, self.heads), heads(k, self.heads), heads(v, self.value_heads)
        theta, eta, alpha = self.rate_max * self.theta(x).sigmoid(), self.eta(x).sigmoid(), self.alpha(x).sigmoid()
        theta = (1 - eta) * theta if self.bounded else theta
        o = turn.read(ops.momentum_delta_rule, q, k, v, theta=theta, eta=eta, alpha=alpha, use_qk_l2norm_in_kernel=True)
        z = None if self.gate is None else heads(self.gate(x), self.value_heads)
        return self.output(self.norm(o, z).flatten(-2))
