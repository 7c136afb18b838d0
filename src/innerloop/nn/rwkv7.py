"""RWKV-7: a memory that erases at one key and writes at another."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from innerloop import ops
from innerloop.nn.layer import Layer, Turn
from innerloop.nn.norms import HeadNorm, unit
from innerloop.nn.projections import LowRank, Projection, heads, width_of_heads
from innerloop.nn.state import LayerState

FASTEST = -math.exp(-0.5)
"""The log of the fastest decay."""


class RWKV7(Layer):
    r"""The generalized delta rule over shifted tokens, with a bonus for the current one.

    .. math::
        g = -e^{-1/2} \sigma(w), \qquad \kappa = \frac{k \circ \xi}{|k \circ \xi|}, \qquad
        k' = k \circ (1 + (a - 1) \circ \rho), \qquad
        y = W_o \big(z \circ (\mathrm{GroupNorm}(o) + (\textstyle\sum r \circ k' \circ u) \, v)\big)

    r, k, v, w, a and the gate z are made each of a mixture of the token and the one before it; w, a, z by small
    networks. From the second layer on, v is mixed with that of the first. Peng et al. (2025), arXiv:2503.14456.

    Args:
        width: Of the model, D.
        heads: H.
        key_width: Of a head, K; D / H if None (the paper's is 64).
        value_width: Of a head, V; K if None.
        index: Which layer of the model this is, from 0; the start depends on it, and others than 0 take
            ``first_value``.
        layers: How many the model has.

    Raises:
        ValueError: If sizes do not divide, or the index is not below the number of layers.

    Example:
        >>> import torch
        >>> from innerloop import nn
        >>> first, second = (nn.RWKV7(32, heads=2, index=i, layers=2) for i in range(2))
        >>> x = torch.randn(3, 10, 32)
        >>> y, state, value = first(x, output_first_value=True)
        >>> y, state = second(x + y, first_value=value)
        >>> y.shape, state.memory.shape
        (torch.Size([3, 10, 32]), torch.Size([3, 2, 16, 16]))
    """

    rule = "rwkv7"

    def __init__(
        self,
        width: int,
        heads: int = 4,
        *,
        key_width: int | None = None,
        value_width: int | None = None,
        index: int = 0,
        layers: int = 1,
    ) -> None:
        """Draw the weights."""
        super().__init__(width)
        if not 0 <= index < layers:
            raise ValueError(f"index must lie between 0 and layers-1={layers - 1}; got {index}")
        K = width_of_heads(width, heads, key_width)
        V = K if value_width is None else width_of_heads(width, heads, value_width)
        self.heads, self.index = heads, index
        start = Start(K * heads, K, index, layers)
        values = Start(V * heads, V, index, layers)
        self.mixture = Mixture(width, index, layers)
        bound = 0.5 / math.sqrt(width)
        self.receptance = Projection(width, heads * K, bound=bound)
        self.key = Projection(width, heads * K, bound=0.1 * bound)
        self.value = Projection(width, heads * V, bound=bound)
        self.output = Projection(heads * V, width, bound=0.0)
        factor = K / 64
        self.decay = LowRank(width, _rank(2.5, width, factor), heads * K, activation="tanh", start=start.decay)
        self.rate = LowRank(width, _rank(2.5, width, factor), heads * K, start=start.rate)
        self.first = LowRank(width, _rank(1.7, width, factor), heads * V, start=values.first) if index else None
        self.gate = LowRank(width, _rank(5, width, 1), heads * V, activation="sigmoid")
        self.channels = Channels(heads * K, start)
        self.norm = HeadNorm(heads, V, eps=64e-5, start=((index + 1) / layers) ** 0.7)

    def forward(
        self,
        x: Tensor,
        state: LayerState | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        first_value: Tensor | None = None,
        output_first_value: bool = False,
    ) -> tuple[Tensor, LayerState] | tuple[Tensor, LayerState, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run the layer as ``Layer.forward`` says.

        Args:
            x: Tokens, ``[B, T, D]``.
            state: What the last call returned; None before the first token.
            attention_mask: Which tokens are real, ``[B, T]``.
            cu_seqlens: Bounds of packed sequences.
            first_value: The values of layer 0 at these tokens, ``[B, T, H * V]``; all other layers need them.
            output_first_value: Whether to return them, of layer 0 its own.

        Returns:
            ``y`` and the state, and the first layer's values if asked for.

        Raises:
            ValueError: If ``first_value`` is missing or one too many, or as ``Layer.forward`` says.
        """
        if (first_value is None) != (self.index == 0):
            raise ValueError("first_value must be given to every layer but the first, which makes it; "
                             f"this is layer {self.index}")  # fmt: skip
        packed = self._arranged(x, state, attention_mask, cu_seqlens)
        if first_value is not None and first_value.shape != (*x.shape[:2], self.value.out_features):
            wanted = [*x.shape[:2], self.value.out_features]
            raise ValueError(f"first_value must have shape [B, T, H * V] = {wanted}; got {list(first_value.shape)}")
        x = packed.pack(x)
        turn = Turn(self.rule, x, packed.sequences, state, self._observers)
        y, value = self._run(x, turn, None if first_value is None else packed.pack(first_value))
        if output_first_value:
            return packed.unpack(y), turn.after(), packed.unpack(value)
        return packed.unpack(y), turn.after()

    def _run(self, x: Tensor, turn: Turn, first: Tensor | None) -> tuple[Tensor, Tensor]:
        shifted = self.mixture(x, turn.shift("token", x))
        r, k, v = self.receptance(shifted["r"]), self.key(shifted["k"]), self.value(shifted["v"])
        g = FASTEST * self.decay(shifted["w"]).sigmoid()
        a = self.rate(shifted["a"]).sigmoid()
        z = self.gate(shifted["g"])
        if self.first is not None and first is not None:
            v = torch.lerp(v.to(z.dtype), first.to(z.dtype), self.first(shifted["v"]).sigmoid()).to(v.dtype)
        kappa, k, bonus = self.channels(r, k, a, self.heads)
        o = turn.read(
            ops.rwkv7,
            heads(r, self.heads),
            heads(k.to(v.dtype), self.heads),
            heads(v, self.heads),
            g=heads(g, self.heads),
            a=heads(a, self.heads),
            kappa=kappa,
        )
        y = self.norm(o).to(z.dtype) + bonus * heads(v, self.heads)
        return self.output((y.flatten(-2) * z).to(v.dtype)), v if first is None else first


class Mixture(nn.Module):
    """How much of the token before is in what each of the projections sees, channel by channel."""

    POWERS: ClassVar = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}

    def __init__(self, width: int, index: int, layers: int) -> None:
        """Begin with more of it in early channels and late layers."""
        super().__init__()
        self.fade = 1 - index / layers
        self.weights = nn.ParameterDict({name: nn.Parameter(torch.empty(width)) for name in self.POWERS})
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Begin anew."""
        for name, weight in self.weights.items():
            if weight.is_meta:
                continue  # torch would load its compiler for no numbers
            place = torch.arange(weight.shape[0], dtype=torch.float64, device=weight.device) / weight.shape[0]
            with torch.no_grad():
                weight.copy_(1 - place ** (self.POWERS[name] * self.fade))

    def forward(self, x: Tensor, before: Tensor) -> dict[str, Tensor]:
        """Return the six mixtures of ``x`` and the tokens before."""
        difference = before - x
        return {name: torch.addcmul(x, difference, weight.to(x.dtype)) for name, weight in self.weights.items()}


class Channels(nn.Module):
    """The removal key, the key that is written, and the weight of the current token's own pair."""

    def __init__(self, width: int, start: Start) -> None:
        """Begin where RWKV-7 does."""
        super().__init__()
        self.start = start
        self.removal, self.replacement = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))
        self.bonus = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Begin anew."""
        if self.removal.is_meta:
            return
        with torch.no_grad():
            self.removal.copy_(0.71 - 0.1 * self.start.slope())
            self.replacement.fill_(1.02)
            self.bonus.fill_(-0.04)

    def forward(self, r: Tensor, k: Tensor, a: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return kappa ``[B, T, H, K]``, k' ``[B, T, H * K]`` and the bonus's weight ``[B, T, H, 1]``, all wide."""
        removal, replacement, bonus = (p.to(a.dtype) for p in (self.removal, self.replacement, self.bonus))
        k = k.to(a.dtype)
        kappa = unit(heads(k * removal, count))
        k = k * (1 + (a - 1) * replacement)
        return kappa, k, heads(r.to(a.dtype) * k * bonus, count).sum(-1, keepdim=True)


class Start:
    """Where RWKV-7's offsets begin: a slope over all channels and a zigzag over those of a head."""

    def __init__(self, channels: int, width: int, index: int, layers: int) -> None:
        """Keep the sizes; a model of one layer and a head of one channel divide by 1."""
        self.channels, self.width = channels, width
        self.ratio = index / max(layers - 1, 1)

    def slope(self) -> Tensor:
        """Return numbers from -1/2 to 1/2."""
        return torch.arange(self.channels, dtype=torch.float64) / max(self.channels - 1, 1) - 0.5

    def zigzag(self) -> Tensor:
        """Return a signed square from -1 to 1 in every head."""
        middle = (self.width - 1) / 2
        place = (torch.arange(self.channels, dtype=torch.float64) % self.width - middle) / max(middle, 0.5)
        return place * place.abs()

    def decay(self) -> Tensor:
        """Return the offset of w."""
        rise = (self.slope() + 0.5) ** (1 + self.ratio**0.3)
        return -6 + 6 * rise + 0.5 + 2.5 * self.zigzag()

    def rate(self) -> Tensor:
        """Return the offset of a."""
        return -0.19 + 0.3 * self.zigzag() + 0.4 * self.slope()

    def first(self) -> Tensor:
        """Return the offset of how much of the first layer's value is taken."""
        return 0.73 - 0.4 * self.slope()


def _rank(scale: float, width: int, factor: float) -> int:
    return max(32, round(scale * math.sqrt(width) * factor / 32) * 32)
