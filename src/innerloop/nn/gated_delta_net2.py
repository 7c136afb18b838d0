"""Gated DeltaNet-2: what is erased and what is written have gates of their own, channel by channel."""

from __future__ import annotations

from torch import Tensor

from innerloop import ops
from innerloop.nn.gates import Decay, GateProjection, narrow_gates
from innerloop.nn.layer import Layer, Turn
from innerloop.nn.norms import Activation, RMSNorm
from innerloop.nn.projections import Projection, heads, narrow, value_heads_of, width_of_heads
from innerloop.nn.streams import Streams


class GatedDeltaNet2(Layer):
    r"""The decoupled gated delta rule on unit keys.

    .. math::
        g = -e^{A} \, \mathrm{softplus}(W^\uparrow_a W^\downarrow_a x + d), \qquad
        b = \sigma(W_b x), \quad w = \sigma(W_w x), \qquad
        y = W_o (\mathrm{RMSNorm}(o) \circ \phi(W^\uparrow_z W^\downarrow_z x + c))

    Hatamizadeh, Choi and Kautz (2026), arXiv:2605.22791. The output gate's activation differs among what is in use:
    sigmoid (as in Kimi Delta Attention, the default) or SiLU (the authors').

    Args:
        width: Of the model, D.
        heads: Key heads, H.
        key_width: Of a head, K; D / H if None.
        value_width: Of a head, V; K if None.
        value_heads: G, a multiple of H; H if None.
        taps: Of the convolutions; 0 leaves them out.
        allow_neg_eigval: Double b, so that a write may reflect.
        activation: Of the output gate, ``"sigmoid"`` or ``"silu"``.

    Raises:
        ValueError: If sizes do not divide, or the activation is unknown.

    Example:
        >>> import torch
        >>> from innerloop import nn
        >>> y, state = nn.GatedDeltaNet2(32, heads=2, activation="silu")(torch.randn(3, 10, 32))
        >>> y.shape, state.memory.shape
        (torch.Size([3, 10, 32]), torch.Size([3, 2, 16, 16]))
    """

    rule = "gdn2"

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
        activation: Activation = "sigmoid",
    ) -> None:
        """Draw the weights."""
        super().__init__(width)
        self.heads, self.value_heads = heads, value_heads_of(heads, value_heads)
        K = width_of_heads(width, heads, key_width)
        V = K if value_width is None else width_of_heads(width, heads, value_width)
        G = self.value_heads
        self.streams = Streams(width, {"query": heads * K, "key": heads * K, "value": G * V}, taps)
        self.a = narrow_gates(width, V, G * K)
        self.b, self.w = GateProjection(width, G * K), GateProjection(width, G * V)
        self.decay = Decay(G, K, rates=(1.0, 16.0))
        self.strongest = 2.0 if allow_neg_eigval else 1.0
        self.gate = narrow(width, V, G * V, bias=True)
        self.norm = RMSNorm(V, activation=activation)
        self.output = Projection(G * V, width)

    def mix(self, x: Tensor, turn: Turn) -> Tensor:
        """Run the paper's layer."""
        G = self.value_heads
        q, k, v = self.streams(x, turn)
        q, k, v = heads(q, self.heads), heads(k, self.heads), heads(v, G)
        g = self.decay(heads(self.a(x), G))
        b, w = self.strongest * heads(self.b(x), G).sigmoid(), heads(self.w(x), G).sigmoid()
        o = turn.read(ops.gdn2, q, k, v, g=g, b=b, w=w, use_qk_l2norm_in_kernel=True)
        return self.output(self.norm(o, heads(self.gate(x), G)).flatten(-2))
