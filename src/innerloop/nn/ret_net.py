"""RetNet: an additive memory that fades at a rate of its head."""

from __future__ import annotations

from torch import Tensor

from innerloop import ops
from innerloop.nn.layer import Layer, Turn
from innerloop.nn.norms import RMSNorm
from innerloop.nn.projections import Projection, heads, value_heads_of, width_of_heads
from innerloop.nn.rotary import check_rotary, frequencies_of, rotate
from innerloop.nn.streams import Streams


class RetNet(Layer):
    r"""Multi-scale retention: rotated keys, one fixed decay a head, a norm and a gate.

    .. math::
        g_h = \log(1 - 2^{-5-h}), \qquad y = W_o (\mathrm{RMSNorm}(o) \circ \mathrm{SiLU}(W_z x))

    Sun et al. (2023), arXiv:2307.08621; the norm has no weight and is the authors' code's.

    Args:
        width: Of the model, D.
        heads: Key heads, H.
        key_width: Of a head, K, even; D / H if None.
        value_width: Of a head, V; K if None (the paper's is 2K).
        value_heads: G, a multiple of H; H if None. Decays go by value head.
        rotary_base: Of the rotations' frequencies.

    Raises:
        ValueError: If sizes do not divide, or K is odd.

    Example:
        >>> import torch
        >>> from innerloop import nn
        >>> y, state = nn.RetNet(32, heads=2)(torch.randn(3, 10, 32))
        >>> y.shape, state.memory.shape
        (torch.Size([3, 10, 32]), torch.Size([3, 2, 16, 16]))
    """

    rule = "retention"

    def __init__(
        self,
        width: int,
        heads: int = 4,
        *,
        key_width: int | None = None,
        value_width: int | None = None,
        value_heads: int | None = None,
        rotary_base: float = 10_000.0,
    ) -> None:
        """Draw the weights."""
        super().__init__(width)
        self.heads, self.value_heads, self.rotary_base = heads, value_heads_of(heads, value_heads), rotary_base
        self.key_width = K = width_of_heads(width, heads, key_width)
        V = K if value_width is None else width_of_heads(width, heads, value_width)
        check_rotary(K)
        sizes = {"query": heads * K, "key": heads * K, "value": self.value_heads * V}
        self.streams = Streams(width, sizes, 0, straight=sizes)
        self.gate = Projection(width, self.value_heads * V)
        self.norm = RMSNorm(V, affine=False)
        self.output = Projection(self.value_heads * V, width)

    def mix(self, x: Tensor, turn: Turn) -> Tensor:
        """Run the paper's layer."""
        q, k, v = self.streams(x, turn)
        positions = turn.positions()
        frequencies = frequencies_of(self.key_width, self.rotary_base, x.device, reach_base=True)
        q, k = (rotate(heads(y, self.heads), positions, frequencies) for y in (q, k))
        o = turn.read(ops.retention, q, k, heads(v, self.value_heads))
        return self.output(self.norm(o, heads(self.gate(x), self.value_heads)).flatten(-2))
