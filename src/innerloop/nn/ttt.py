"""Test-time training: a small network learns each mini-batch of the sequence while it is read."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from innerloop import ops
from innerloop.arguments import check_choice, check_count, check_flags, check_positive
from innerloop.nn.first_weights import FirstWeights
from innerloop.nn.gates import GateProjection
from innerloop.nn.layer import Layer, Turn
from innerloop.nn.norms import HeadNorm
from innerloop.nn.projections import Projection, heads, width_of_heads
from innerloop.nn.rotary import check_rotary, frequencies_of, rotate
from innerloop.nn.streams import Streams


class TTT(Layer):
    r"""TTT-Linear and TTT-MLP, behind rotations that begin anew in each mini-batch.

    .. math::
        lr = \frac{base}{K} \sigma(w x + b), \qquad o = q + LN(f_W(q)), \qquad y = W_o LN(o)

    Sun et al. (2024), arXiv:2407.04620, and its published code: base 1 for the linear memory and .1 for the MLP, the
    factor 1/i inside a mini-batch with a learned offset, first weights normal with deviation .02.

    Args:
        width: Of the model, D.
        heads: H.
        key_width: Of a head, K, which is even; D / H if None.
        memory: ``"linear"`` or ``"mlp"``.
        expansion: Hidden channels of the MLP, as a multiple of K.
        mini_batch: Tokens whose gradients are taken at the same weights.
        rate: The base rate; as published if None.
        output_gate: Whether the output is gated by GELU of a projection.

    Raises:
        ValueError: If sizes do not divide, K is odd, or the memory is unknown.

    Example:
        >>> import torch
        >>> from innerloop import nn
        >>> y, state = nn.TTT(32, heads=2)(torch.randn(3, 20, 32))
        >>> y.shape, state.memory.start[0].shape
        (torch.Size([3, 20, 32]), torch.Size([3, 2, 16, 16]))
    """

    rule = "ttt"

    def __init__(
        self,
        width: int,
        heads: int = 4,
        *,
        key_width: int | None = None,
        memory: Literal["linear", "mlp"] = "linear",
        expansion: int = 4,
        mini_batch: int = 16,
        rate: float | None = None,
        output_gate: bool = False,
    ) -> None:
        """Draw the weights."""
        super().__init__(width)
        K = width_of_heads(width, heads, key_width)
        check_rotary(K)
        check_choice("memory", memory, ("linear", "mlp"))
        check_count("expansion", expansion)
        check_flags(output_gate=output_gate)
        self.heads, self.key_width, self.mini_batch = heads, K, mini_batch
        self.rate = (1.0 if memory == "linear" else 0.1) if rate is None else rate
        check_positive("rate", self.rate)
        sizes = {"query": heads * K, "key": heads * K, "value": heads * K}
        self.streams = Streams(width, sizes, 0, straight=sizes)
        self.lr = GateProjection(width, heads, start=0.0)
        widths = (K, K) if memory == "linear" else (K, expansion * K, K)
        self.first = FirstWeights(heads, widths, spread=0.02, bias=True)
        self.inner_norm = InnerNorm(heads, K, mini_batch)
        self.norm = HeadNorm(1, heads * K, eps=1e-6)
        self.gate = Projection(width, heads * K) if output_gate else None
        self.output = Projection(heads * K, width)

    def mix(self, x: Tensor, turn: Turn) -> Tensor:
        """Run the paper's layer."""
        q, k, v = (heads(y, self.heads) for y in self.streams(x, turn))
        frequencies = frequencies_of(self.key_width, 10_000.0, x.device)
        places = turn.positions() % self.mini_batch
        q, k = rotate(q, places, frequencies), rotate(k, places, frequencies)
        lr = self.rate / self.key_width * self.lr(x).sigmoid()
        o = turn.learn(
            ops.ttt, q, k, v, lr=lr, weights=self.first(), norm_weight=self.inner_norm.weight,
            norm_bias=self.inner_norm.bias, position_offset=self.inner_norm.offset, mini_batch=self.mini_batch,
        )  # fmt: skip
        y = self.norm(o.flatten(-2)[..., None, :])[..., 0, :]
        return self.output(y if self.gate is None else F.gelu(self.gate(x), approximate="tanh") * y)


class InnerNorm(nn.Module):
    """The norm inside the memory's loss, and what is learned on top of the factor 1/i."""

    def __init__(self, heads: int, width: int, mini_batch: int) -> None:
        """Begin with weights of 1, no bias and no offset."""
        super().__init__()
        check_count("mini_batch", mini_batch)
        self.weight, self.bias = nn.Parameter(torch.empty(heads, width)), nn.Parameter(torch.empty(heads, width))
        self.offset = nn.Parameter(torch.empty(mini_batch))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Begin anew."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        nn.init.zeros_(self.offset)
