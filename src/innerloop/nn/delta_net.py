"""DeltaNet: a memory that edits and never fades."""

from __future__ import annotations

from torch import Tensor

from innerloop import ops
from innerloop.kernels.native.series import Series
from innerloop.nn.gates import GateProjection
from innerloop.nn.layer import Layer, Turn
from innerloop.nn.norms import RMSNorm
from innerloop.nn.projections import Projection, heads, value_heads_of, width_of_heads
from innerloop.nn.state import LayerState
from innerloop.nn.streams import Streams
from innerloop.nn.written import written_step


class DeltaNet(Layer):
    r"""The delta rule on unit keys, behind short convolutions.

    .. math:: \beta = \sigma(W_\beta x), \qquad y = W_o \, \mathrm{RMSNorm}(o)

    Yang et al. (2024), arXiv:2406.06484.

    Args:
        width: Of the model, D.
        heads: Key heads, H.
        key_width: Of a head, K; D / H if None.
        value_width: Of a head, V; K if None.
        value_heads: G, a multiple of H; H if None.
        taps: Of the convolutions; 0 leaves them out.
        allow_neg_eigval: Double beta, so that a write may reflect (arXiv:2411.12537).
        output_gate: Whether SiLU of a projection gates the read; the paper has none.

    Raises:
        ValueError: If sizes do not divide.

    Example:
        >>> import torch
        >>> from innerloop import nn
        >>> y, state = nn.DeltaNet(32, heads=2)(torch.randn(3, 10, 32))
        >>> y.shape, state.memory.shape
        (torch.Size([3, 10, 32]), torch.Size([3, 2, 16, 16]))
    """

    rule = "delta_rule"

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
        output_gate: bool = False,
    ) -> None:
        """Draw the weights."""
        super().__init__(width)
        self.heads, self.value_heads = heads, value_heads_of(heads, value_heads)
        K = width_of_heads(width, heads, key_width)
        V = K if value_width is None else width_of_heads(width, heads, value_width)
        self.streams = Streams(width, {"query": heads * K, "key": heads * K, "value": self.value_heads * V}, taps)
        self.b = GateProjection(width, self.value_heads)
        self.strongest = 2.0 if allow_neg_eigval else 1.0
        self.gate = Projection(width, self.value_heads * V) if output_gate else None
        self.norm = RMSNorm(V)
        self.output = Projection(self.value_heads * V, width)

    def mix(self, x: Tensor, turn: Turn) -> Tensor:
        """Run the paper's layer."""
        q, k, v = self.streams(x, turn)
        q, k, v = heads(q, self.heads), heads(k, self.heads), heads(v, self.value_heads)
        beta = self.strongest * self.b(x).sigmoid()
        o = turn.read(ops.delta_rule, q, k, v, beta=beta, use_qk_l2norm_in_kernel=True)
        z = None if self.gate is None else heads(self.gate(x), self.value_heads)
        return self.output(self.norm(o, z).flatten(-2))

    def write(self, series: Series, x: Tensor, state: LayerState, stream: Tensor) -> None:
        """Write down ``mix`` for one token, whose output is added to the stream."""
        parts = len(self.streams.weights)
        more = [self.b.weight, *([] if self.gate is None else [self.gate.weight])]
        mapped = series.linear(x, [*self.streams.weights, *more])
        q, k, v = self.streams.write(series, mapped[:parts], state)
        b, *z = mapped[parts:]
        q, k, v = heads(q, self.heads), heads(k, self.heads), heads(v, self.value_heads)
        o = written_step(series, self.rule, q, k, v, {"beta": series.sigmoid(b, self.strongest)}, state, unit=True)
        o = series.norm(o, self.norm.weight, self.norm.eps, *(heads(gate, self.value_heads) for gate in z))
        series.linear(o.flatten(1), [self.output.weight], add_to=stream)
