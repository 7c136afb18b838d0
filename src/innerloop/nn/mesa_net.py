"""MesaNet: the best fit to the whole weighted past, after every token."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from innerloop import ops
from innerloop.nn.gates import GateProjection, InverseSoftplus
from innerloop.nn.layer import Layer, Turn
from innerloop.nn.norms import RMSNorm
from innerloop.nn.projections import Projection, heads, value_heads_of, width_of_heads
from innerloop.nn.streams import Streams


class MesaNet(Layer):
    r"""Ridge regression on unit keys with a forgotten and weighted past, solved by conjugate gradients.

    .. math::
        g = \log \sigma(W_a x + a), \qquad \beta = \sigma(W_\beta x + b), \qquad
        \lambda = \mathrm{softplus}(l) + \tfrac14, \qquad y = W_o \, \mathrm{RMSNorm}(o)

    Von Oswald et al. (2025), arXiv:2506.05233. Queries and keys are convolved, values are not; lambda begins at 1.

    Args:
        width: Of the model, D.
        heads: Key heads, H.
        key_width: Of a head, K; D / H if None.
        value_width: Of a head, V; K if None.
        value_heads: G, a multiple of H; H if None.
        taps: Of the convolutions; 0 leaves them out.
        iterations: Steps of conjugate gradients a token.
        floor: The smallest lambda, below 1.
        output_gate: Whether SiLU of a projection gates the read; the paper has none.

    Raises:
        ValueError: If sizes do not divide, or the floor is not in [0, 1).

    Example:
        >>> import torch
        >>> from innerloop import nn
        >>> y, state = nn.MesaNet(32, heads=2)(torch.randn(3, 10, 32))
        >>> y.shape, state.memory.H_kk.shape
        (torch.Size([3, 10, 32]), torch.Size([3, 2, 16, 16]))
    """

    rule = "mesa"

    def __init__(
        self,
        width: int,
        heads: int = 4,
        *,
        key_width: int | None = None,
        value_width: int | None = None,
        value_heads: int | None = None,
        taps: int = 4,
        iterations: int = 30,
        floor: float = 0.25,
        output_gate: bool = False,
    ) -> None:
        """Draw the weights."""
        super().__init__(width)
        if not 0 <= floor < 1:
            raise ValueError(f"floor must lie in [0, 1); got {floor}")
        self.heads, self.value_heads = heads, value_heads_of(heads, value_heads)
        self.iterations, self.floor = iterations, floor
        K = width_of_heads(width, heads, key_width)
        V = K if value_width is None else width_of_heads(width, heads, value_width)
        G = self.value_heads
        sizes = {"query": heads * K, "key": heads * K, "value": G * V}
        self.streams = Streams(width, sizes, taps, straight=("value",))
        self.a, self.b = GateProjection(width, G, start=0.0), GateProjection(width, G, start=0.0)
        self.ridge = InverseSoftplus(G, K, start=1 - floor)
        self.gate = Projection(width, G * V) if output_gate else None
        self.norm = RMSNorm(V)
        self.output = Projection(G * V, width)

    def mix(self, x: Tensor, turn: Turn) -> Tensor:
        """Run the paper's layer."""
        q, k, v = self.streams(x, turn)
        q, k, v = heads(q, self.heads), heads(k, self.heads), heads(v, self.value_heads)
        g, beta, lamb = F.logsigmoid(self.a(x)), self.b(x).sigmoid(), self.ridge() + self.floor
        o = turn.read(
            ops.mesa, q, k, v, g=g, beta=beta, lamb=lamb, iterations=self.iterations, use_qk_l2norm_in_kernel=True
        )
        z = None if self.gate is None else heads(self.gate(x), self.value_heads)
        return self.output(self.norm(o, z).flatten(-2))
