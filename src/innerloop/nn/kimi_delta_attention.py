"""Kimi Delta Attention: the gated delta rule with a decay for every channel."""

from __future__ import annotations

from torch import Tensor

from innerloop import ops
from innerloop.nn.gates import Decay, GateProjection, narrow_gates
from innerloop.nn.layer import Layer, Turn
from innerloop.nn.norms import RMSNorm
from innerloop.nn.projections import Projection, heads, narrow, value_heads_of, width_of_heads
from innerloop.nn.streams import Streams


class KimiDeltaAttention(Layer):
    r"""The delta rule on unit keys whose channels fade apart, under a sigmoid gate.

    .. math::
        g = -e^{A} \, \mathrm{softplus}(W^\uparrow_a W^\downarrow_a x + b), \qquad \beta = \sigma(W_\beta x), \qquad
        y = W_o (\mathrm{RMSNorm}(o) \circ \sigma(W^\uparrow_z W^\downarrow_z x + c))

    Kimi Team (2025), arXiv:2510.26692. The narrow maps pass through V channels.

    Args:
        width: Of the model, D.
        heads: Key heads, H.
        key_width: Of a head, K; D / H if None.
        value_width: Of a head, V; K if None.
        value_heads: G, a multiple of H; H if None.
        taps: Of the convolutions; 0 leaves them out.
        allow_neg_eigval: Double beta, so that a write may reflect.
        lower_bound: The log decay that no channel exceeds, below 0: then g is ``lower_bound * sigmoid(e^A (a + b))``.

    Raises:
        ValueError: If sizes do not divide, or ``lower_bound`` is not below 0.

    Example:
        >>> import torch
        >>> from innerloop import nn
        >>> y, state = nn.KimiDeltaAttention(32, heads=2)(torch.randn(3, 10, 32))
        >>> y.shape, state.memory.shape
        (torch.Size([3, 10, 32]), torch.Size([3, 2, 16, 16]))
    """

    rule = "kda"

    def __init__(
        self,
        width: int,
        heads: int = 4,
        *,
        key_width: int | None = None,
        value_width: int | None = None,
        value_heads: int | None = None,
        taps: int = 4,
        allow_neg_eigval: bool = False,
        lower_bound: float | None = None,
    ) -> None:
        """Draw the weights."""
        super().__init__(width)
        self.heads, self.value_heads = heads, value_heads_of(heads, value_heads)
        K = width_of_heads(width, heads, key_width)
        V = K if value_width is None else width_of_heads(width, heads, value_width)
        G = self.value_heads
        self.streams = Streams(width, {"query": heads * K, "key": heads * K, "value": G * V}, taps)
        self.a = narrow_gates(width, V, G * K)
        self.b = GateProjection(width, G)
        self.decay = Decay(G, K, rates=(1.0, 16.0), lower_bound=lower_bound)
        self.strongest = 2.0 if allow_neg_eigval else 1.0
        self.gate = narrow(width, V, G * V, bias=True)
        self.norm = RMSNorm(V, activation="sigmoid")
        self.output = Projection(G * V, width)

    def mix(self, x: Tensor, turn: Turn) -> Tensor:
        """Run the paper's layer."""
        q, k, v = self.streams(x, turn)
        q, k, v = heads(q, self.heads), heads(k, self.heads), heads(v, self.value_heads)
        g, beta = self.decay(heads(self.a(x), self.value_heads)), self.strongest * self.b(x).sigmoid()
        o = turn.read(ops.kda, q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
        return self.output(self.norm(o, heads(self.gate(x), self.value_heads)).flatten(-2))
