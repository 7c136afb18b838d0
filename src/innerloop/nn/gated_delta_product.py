"""Gated DeltaProduct: several delta steps a token."""

from __future__ import annotations

from torch import Tensor

from innerloop import ops
from innerloop.nn.gates import Decay, GateProjection
from innerloop.nn.layer import Layer, Turn
from innerloop.nn.norms import RMSNorm
from innerloop.nn.projections import Projection, heads, value_heads_of, width_of_heads
from innerloop.nn.streams import Streams


class GatedDeltaProduct(Layer):
    r"""n delta steps a token, each with a key, a value and a strength of its own, on a memory that fades once.

    .. math::
        g = -e^{A} \, \mathrm{softplus}(W_a x + b), \qquad \beta_i = 2 \sigma(W_{\beta,i} x), \qquad
        y = W_o (\mathrm{RMSNorm}(o) \circ \mathrm{SiLU}(W_z x))

    Siems et al. (2025), arXiv:2502.10297. With beta up to 2 a product of n steps is any product of n reflections.

    Args:
        width: Of the model, D.
        heads: Key heads, H.
        steps: n, a token.
        key_width: Of a head, K; D / H if None.
        value_width: Of a head, V; K if None.
        value_heads: G, a multiple of H; H if None.
        taps: Of the convolutions; 0 leaves them out.
        allow_neg_eigval: Double beta.
        forget_gate: Whether the memory fades; without it is the paper's DeltaProduct.
        output_gate: Whether the read is gated.

    Raises:
        ValueError: If sizes do not divide, or there is no step.

    Example:
        >>> import torch
        >>> from innerloop import nn
        >>> y, state = nn.GatedDeltaProduct(32, heads=2, steps=3)(torch.randn(3, 10, 32))
        >>> y.shape, state.memory.shape
        (torch.Size([3, 10, 32]), torch.Size([3, 2, 16, 16]))
    """

    rule = "delta_product"

    def __init__(
        self,
        width: int,
        heads: int = 4,
        *,
        steps: int = 2,
        key_width: int | None = None,
        value_width: int | None = None,
        value_heads: int | None = None,
        taps: int = 4,
        allow_neg_eigval: bool = True,
        forget_gate: bool = True,
        output_gate: bool = True,
    ) -> None:
        """Draw the weights."""
        super().__init__(width)
        if steps < 1:
            raise ValueError(f"steps must be at least 1; got {steps}")
        self.steps, self.heads, self.value_heads = steps, heads, value_heads_of(heads, value_heads)
        K = width_of_heads(width, heads, key_width)
        V = K if value_width is None else width_of_heads(width, heads, value_width)
        G = self.value_heads
        self.streams = Streams(width, {"query": heads * K, "key": steps * heads * K, "value": steps * G * V}, taps)
        self.a = GateProjection(width, G) if forget_gate else None
        self.decay = Decay(G) if forget_gate else None
        self.b = GateProjection(width, steps * G)
        self.strongest = 2.0 if allow_neg_eigval else 1.0
        self.gate = Projection(width, G * V) if output_gate else None
        self.norm = RMSNorm(V)
        self.output = Projection(G * V, width)

    def mix(self, x: Tensor, turn: Turn) -> Tensor:
        """Run the paper's layer."""
        q, k, v = self.streams(x, turn)
        q = heads(q, self.heads)
        k, v = k.unflatten(-1, (self.steps, self.heads, -1)), v.unflatten(-1, (self.steps, self.value_heads, -1))
        beta = self.strongest * self.b(x).sigmoid().unflatten(-1, (self.steps, self.value_heads))
        g = None if self.decay is None or self.a is None else self.decay(self.a(x))
        o = turn.read(ops.delta_product, q, k, v, beta=beta, g=g, use_qk_l2norm_in_kernel=True)
        z = None if self.gate is None else heads(self.gate(x), self.value_heads)
        return self.output(self.norm(o, z).flatten(-2))
