"""One operator a family: names that rules map onto."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from innerloop.algebra.additive import additive_chunks
from innerloop.algebra.attention import attend
from innerloop.algebra.channel import (
    channel_additive_chunks,
    channel_delta_chunks,
    decoupled_delta_chunks,
    generalized_delta_chunks,
)
from innerloop.algebra.chunks import in_chunks
from innerloop.algebra.delta import delta_chunks, proximal_delta_chunks
from innerloop.algebra.diagonal import diagonal_chunks
from innerloop.algebra.mesa import mesa_chunks
from innerloop.algebra.momentum import momentum_chunks
from innerloop.algebra.ridge import ridge_chunks
from innerloop.kernels.native import Channel, Momentum, Scalar
from innerloop.kernels.operator import Operator
from innerloop.kernels.portable import Dense

MATRIX = {"S": ("G", "K", "V")}


def _chunked(function: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]) -> Dense:
    def dense(
        tokens: Sequence[Any], states: tuple[Tensor, ...], chunk_size: int, constants: Sequence[float]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return in_chunks(lambda *chunks: function(*chunks, *constants), tokens, states, chunk_size)

    return dense


def _attention(
    tokens: Sequence[Any], states: tuple[Tensor, ...], chunk_size: int, constants: Sequence[float]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    del chunk_size, constants
    q, k, v = tokens
    return attend(q, k, v, states)


ADDITIVE = Operator("additive", _chunked(additive_chunks), gates=("g",), states=MATRIX, native=Scalar(0, ("g",)))
DELTA = Operator("delta", _chunked(delta_chunks), gates=("g", "beta"), states=MATRIX, native=Scalar(1, ("g", "beta")))
PROXIMAL_DELTA = Operator(
    "proximal_delta", _chunked(proximal_delta_chunks), gates=("beta",), states=MATRIX, native=Scalar(2, ("beta",))
)
CHANNEL_ADDITIVE = Operator(
    "channel_additive", _chunked(channel_additive_chunks), gates=("g",), states=MATRIX, native=Channel(("g",))
)
CHANNEL_DELTA = Operator(
    "channel_delta", _chunked(channel_delta_chunks), gates=("g", "beta"), states=MATRIX, native=Channel(("g", "beta"))
)
DECOUPLED_DELTA = Operator(
    "decoupled_delta",
    _chunked(decoupled_delta_chunks),
    gates=("g", "b", "w"),
    states=MATRIX,
    native=Channel(("g", "b", "w")),
)
GENERALIZED_DELTA = Operator(
    "generalized_delta",
    _chunked(generalized_delta_chunks),
    gates=("g", "a", "kappa"),
    states=MATRIX,
    keyed={"kappa": -2},
    native=Channel(("g", "a", "kappa")),
)
DIAGONAL = Operator("diagonal", _chunked(diagonal_chunks), gates=("beta",), states=MATRIX)
MOMENTUM = Operator(
    "momentum",
    _chunked(momentum_chunks),
    gates=("theta", "eta", "alpha"),
    states={**MATRIX, "U": ("G", "K", "V")},
    native=Momentum(),
)
MESA = Operator(
    "mesa",
    _chunked(mesa_chunks),
    gates=("lamb", "g", "beta"),
    states={"H_kk": ("G", "K", "K"), "H_kv": ("G", "K", "V")},
)
RIDGE = Operator(
    "ridge", _chunked(ridge_chunks), gates=("g",), states={"H_kk": ("G", "K", "K"), "H_kv": ("G", "K", "V")}
)
ATTENTION = Operator(
    "attention",
    _attention,
    gates=(),
    states={"keys": ("S", "H", "K"), "values": ("S", "H", "V"), "lengths": ()},
    grouped=True,
    grows=True,
    fresh=False,
)
