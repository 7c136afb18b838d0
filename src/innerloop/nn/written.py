"""A token's way through a layer, written down as native calls: what layers share."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from innerloop.kernels.native.matrix import Matrices
from innerloop.kernels.native.series import Series
from innerloop.nn.state import LayerState
from innerloop.rule import get


@runtime_checkable
class Written(Protocol):
    """A layer whose way for one token can be written down."""

    def write(self, series: Series, x: Tensor, state: LayerState, stream: Tensor) -> None:
        """Write down what the layer makes of a token ``[N, D]`` behind a state, which it overwrites.

        The output is added to the stream ``[N, D]``.
        """


def served(rule: str) -> bool:
    """Return whether a rule's native kernel can stand in a series."""
    family = get(rule).family
    return family is not None and isinstance(family.native, Matrices) and family.native.present


def written_step(
    series: Series,
    rule: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: dict[str, Tensor],
    state: LayerState,
    *,
    scale: float | None = None,
    unit: bool = False,
) -> Tensor:
    """Write down ``ops.step`` of a rule that is ``served``, which overwrites the layer's memory."""
    known = get(rule)
    assert known.family is not None and isinstance(known.family.native, Matrices)
    scale = known.default_scale(q.shape[-1]) if scale is None else scale
    states = known.state_tensors(state.memory)
    return series.step(known.family.native, q, k, v, gates, states, scale=scale, unit=unit)
