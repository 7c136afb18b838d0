"""From tokens to queries, keys and values: a projection each, a short convolution, SiLU."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from innerloop.arguments import check_count
from innerloop.kernels.native.series import Series
from innerloop.nn.convolution import ShortConvolution
from innerloop.nn.layer import Turn
from innerloop.nn.projections import Projection
from innerloop.nn.state import LayerState


class Streams(nn.Module):
    """Named linear maps of the tokens, each through a convolution of its own.

    Joined, they are one map and one convolution over all channels, which is the same function in fewer pieces.
    """

    def __init__(
        self,
        width: int,
        sizes: dict[str, int],
        taps: int,
        *,
        joined: bool = False,
        straight: Collection[str] = (),
        bias: bool = False,
    ) -> None:
        """Draw the weights; ``straight`` names those without convolution and SiLU, ``taps=0`` leaves only SiLU."""
        super().__init__()
        check_count("taps", taps, 0)
        self.sizes, self.straight = tuple(sizes.values()), frozenset(straight)
        parts = {"joined": sum(self.sizes)} if joined else sizes
        self.maps = nn.ModuleDict({name: Projection(width, size) for name, size in parts.items()})
        convolved = {name: size for name, size in parts.items() if taps and name not in self.straight}
        self.convolutions = nn.ModuleDict({
            name: ShortConvolution(size, taps, bias=bias) for name, size in convolved.items()
        })

    def forward(self, x: Tensor, turn: Turn) -> tuple[Tensor, ...]:
        """Map ``[B, T, D]`` to one tensor a name."""
        found = tuple(self._one(name, x, turn) for name in self.maps)
        return found[0].split(self.sizes, -1) if len(found) < len(self.sizes) else found

    @property
    def weights(self) -> list[Tensor]:
        """The maps' weights."""
        return [linear.weight for linear in self.maps.values()]  # pyright: ignore[reportReturnType]

    def write(self, series: Series, mapped: Sequence[Tensor], state: LayerState) -> tuple[Tensor, ...]:
        """Write down what becomes of one token ``[N, D]`` once it is mapped: one tensor a name."""
        found = []
        for name, x in zip(self.maps, mapped, strict=True):
            if name in self.convolutions:
                convolution = self.convolutions[name]
                assert isinstance(convolution, ShortConvolution)
                x = series.convolve(x, state.windows[name], convolution.weight, convolution.bias)
            elif name not in self.straight:
                x = series.silu(x)
            found.append(x)
        return tuple(found[0].split(self.sizes, -1) if len(found) < len(self.sizes) else found)

    def _one(self, name: str, x: Tensor, turn: Turn) -> Tensor:
        x = self.maps[name](x)
        if name in self.straight:
            return x
        if name not in self.convolutions:
            return F.silu(x)
        convolution = self.convolutions[name]
        assert isinstance(convolution, ShortConvolution)
        return turn.convolve(name, convolution, x)
