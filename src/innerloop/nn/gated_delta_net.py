"""Gated DeltaNet: a memory that fades, then edits."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from innerloop import ops
from innerloop.kernels.native.series import Series
from innerloop.nn.gates import Decay, GateProjection
from innerloop.nn.layer import Layer, Turn
from innerloop.nn.norms import RMSNorm
from innerloop.nn.projections import Projection, heads, value_heads_of, width_of_heads
from innerloop.nn.state import LayerState
from innerloop.nn.streams import Streams
from innerloop.nn.written import written_step


class GatedDeltaNet(Layer):
    r"""The gated delta rule on unit keys, behind short convolutions and under an output gate.

    .. math::
        g = -e^{A} \, \mathrm{softplus}(W_a x + b), \qquad \beta = \sigma(W_\beta x), \qquad
        y = W_o (\mathrm{RMSNorm}(o) \circ \mathrm{SiLU}(W_z x))

    Yang et al. (2025), arXiv:2412.06464. ``variant`` chooses among what is in use: ``"published"``; ``"qwen"``
    (Qwen3-Next, Qwen3.5), with one convolution over q, k and v, ``b`` starting at 1 and eps 1e-6 in the norm;
    ``"olmo"`` (OLMo Hybrid), with beta doubled.

    Args:
        width: Of the model, D.
        heads: Key heads, H.
        key_width: Of a head, K; D / H if None.
        value_width: Of a head, V; K if None (the paper's is 2K).
        value_heads: G, a multiple of H; H if None.
        taps: Of the convolutions; 0 leaves them out.
        allow_neg_eigval: Double beta, so that a write may reflect (arXiv:2411.12537); as the variant has it if None.
        output_gate: Whether the read is gated.
        variant: See above.

    Raises:
        ValueError: If sizes do not divide, or an option is unknown.

    Example:
        >>> import torch
        >>> from innerloop import nn
        >>> layer = nn.GatedDeltaNet(32, heads=2)
        >>> x = torch.randn(3, 10, 32)
        >>> y, _ = layer(x)
        >>> first, state = layer(x[:, :7])
        >>> second, state = layer(x[:, 7:], state)
        >>> torch.allclose(torch.cat((first, second), 1), y, atol=1e-5)
        True
    """

    rule = "gated_delta_rule"

    def __init__(
        self,
        width: int,
        heads: int = 4,
        *,
        key_width: int | None = None,
        value_width: int | None = None,
        value_heads: int | None = None,
        taps: int = 4,
        allow_neg_eigval: bool | None = None,
        output_gate: bool = True,
        variant: Literal["published", "qwen", "olmo"] = "published",
    ) -> None:
        """Draw the weights."""
        super().__init__(width)
        if variant not in ("published", "qwen", "olmo"):
            raise ValueError(f"variant must be 'published', 'qwen' or 'olmo'; got {variant!r}")
        qwen = variant == "qwen"
        self.heads, self.value_heads = heads, value_heads_of(heads, value_heads)
        K = width_of_heads(width, heads, key_width)
        V = K if value_width is None else width_of_heads(width, heads, value_width)
        sizes = {"query": heads * K, "key": heads * K, "value": self.value_heads * V}
        self.streams = Streams(width, sizes, taps, joined=qwen)
        self.a, self.b = GateProjection(width, self.value_heads), GateProjection(width, self.value_heads)
        self.decay = Decay(self.value_heads, dt="ones" if qwen else "log-uniform")
        self.strongest = 2.0 if (variant == "olmo" if allow_neg_eigval is None else allow_neg_eigval) else 1.0
        self.gate = Projection(width, self.value_heads * V) if output_gate else None
        self.norm = RMSNorm(V, eps=1e-6 if qwen else 1e-5)
        self.output = Projection(self.value_heads * V, width)

    def mix(self, x: Tensor, turn: Turn) -> Tensor:
        """Run the paper's layer."""
        q, k, v = self.streams(x, turn)
        q, k, v = heads(q, self.heads), heads(k, self.heads), heads(v, self.value_heads)
        g, beta = self.decay(self.a(x)), self.strongest * self.b(x).sigmoid()
        o = turn.read(ops.gated_delta_rule, q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
        z = None if self.gate is None else heads(self.gate(x), self.value_heads)
        return self.output(self.norm(o, z).flatten(-2))

    def write(self, series: Series, x: Tensor, state: LayerState, stream: Tensor) -> None:
        """Write down ``mix`` for one token, whose output is added to the stream."""
        parts = len(self.streams.weights)
        more = [self.a.weight, self.b.weight, *([] if self.gate is None else [self.gate.weight])]
        mapped = series.linear(x, [*self.streams.weights, *more])
        q, k, v = self.streams.write(series, mapped[:parts], state)
        a, b, *z = mapped[parts:]
        gates = {"g": series.decay(a, self.decay.dt_bias, self.decay.A_log), "beta": series.sigmoid(b, self.strongest)}
        q, k, v = heads(q, self.heads), heads(k, self.heads), heads(v, self.value_heads)
        o = written_step(series, self.rule, q, k, v, gates, state, unit=True)
        o = series.norm(o, self.norm.weight, self.norm.eps, *(heads(gate, self.value_heads) for gate in z))
        series.linear(o.flatten(1), [self.output.weight], add_to=stream)
