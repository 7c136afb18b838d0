"""Any recipe as a trainable layer: slow, and as stated."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from innerloop import states
from innerloop.algebra.self_modifying import unit
from innerloop.kernels.portable import full_precision
from innerloop.nn.first_weights import FirstWeights
from innerloop.nn.gates import GateProjection
from innerloop.nn.layer import Layer, Turn
from innerloop.nn.norms import RMSNorm
from innerloop.nn.projections import Projection, heads, width_of_heads
from innerloop.nn.streams import Streams
from innerloop.recipe import MLP, ChannelDecay, Recipe
from innerloop.recipe.recipe import RecipeState
from innerloop.shapes import compute_dtype

_STARTS = {"weights.g": 6.0, "solver.decay": -8.0}
"""Where a gate's offset begins, if not at 0: what is kept begins near all."""


class RecipeLayer(Layer):
    """A recipe of weights, memory and solver behind projections: a new idea in one line.

    The recipe runs token by token, by automatic differentiation on its loss, and is trained through it. A field of it
    that is None becomes a gate, made of each token: a log decay ``g`` below 0, what has no upper end (``strength``,
    ``ridge``) above 0, anything else between 0 and 1. An MLP's first weights are learned. Its state has no file.

    Args:
        width: Of the model, D.
        recipe: What the memory is and how it learns.
        heads: G.
        key_width: Of a head, K; D / G if None. An MLP says its own.
        taps: Of the convolutions; 0 leaves them out.

    Raises:
        TypeError: If ``recipe`` is none.
        ValueError: If sizes do not divide.

    Example:
        >>> import torch
        >>> from innerloop import nn
        >>> from innerloop.recipe import Exact, LinearMap, Recipe, Window
        >>> layer = nn.RecipeLayer(16, Recipe(Window(4), LinearMap(), Exact(ridge=0.1)), heads=2)
        >>> y, state = layer(torch.randn(3, 10, 16))
        >>> y.shape
        torch.Size([3, 10, 16])
    """

    rule = "recipe"

    def __init__(
        self, width: int, recipe: Recipe, heads: int = 1, *, key_width: int | None = None, taps: int = 4
    ) -> None:
        """Draw the weights."""
        super().__init__(width)
        if not isinstance(recipe, Recipe):
            raise TypeError(f"recipe must be a Recipe(weights, memory, solver); got {type(recipe).__name__}")
        self.recipe, self.heads = recipe, heads
        K = V = width_of_heads(width, heads, key_width)
        self.first = None
        if isinstance(recipe.memory, MLP):
            K, V = recipe.memory.widths[0], recipe.memory.widths[-1]
            self.first = FirstWeights(heads, recipe.memory.widths, bias=recipe.memory.bias)
        self.streams = Streams(width, {"query": heads * K, "key": heads * K, "value": heads * V}, taps)
        self.gates = nn.ModuleDict()
        for path in recipe.gates:
            family, _, field = path.partition(".")
            if getattr(getattr(recipe, family), field) is None:
                channels = K if self._by_channel(path) else 1
                self.gates[path.replace(".", "_")] = GateProjection(
                    width, heads * channels, start=_STARTS.get(path, 0.0)
                )
        self.norm = RMSNorm(V)
        self.output = Projection(heads * V, width)

    def mix(self, x: Tensor, turn: Turn) -> Tensor:
        """Run the recipe over every sequence."""
        q, k, v = (heads(y, self.heads) for y in self.streams(x, turn))
        dtype = compute_dtype(x.dtype)
        tokens = {"q": unit(q).to(dtype), "k": unit(k).to(dtype), "v": v.to(dtype)} | self._gates(x)
        bounds = turn.sequences.bounds
        with full_precision(x):
            if bounds is None:
                past = None if turn.past is None else turn.past.memory
                o, turn.memory = self._run(tokens, past)
            else:
                o, turn.memory = self._run_packed(tokens, turn, bounds.tolist())
        return self.output(self.norm(o.to(x.dtype)).flatten(-2))

    def _gates(self, x: Tensor) -> dict[str, Tensor]:
        found = {}
        for path in self.recipe.gates:
            name = path.replace(".", "_")
            if name in self.gates:
                value = heads(self.gates[name](x), self.heads)
                field = path.partition(".")[2]
                made = F.logsigmoid if field == "g" else F.softplus if field in ("strength", "ridge") else torch.sigmoid
                found[path] = made(value if self._by_channel(path) else value[..., 0])
        return found

    def _by_channel(self, path: str) -> bool:
        return isinstance(getattr(self.recipe, path.partition(".")[0]), ChannelDecay)

    def _run(self, tokens: dict[str, Tensor], state: RecipeState | None) -> tuple[Tensor, RecipeState]:
        if state is None and self.first is not None:
            rows, dtype = tokens["q"].shape[0], tokens["q"].dtype
            state = self.recipe.start(parameters=tuple(w.to(dtype).expand(rows, *w.shape) for w in self.first()))
        gates = {path: x for path, x in tokens.items() if path not in ("q", "k", "v")}
        return self.recipe.run(tokens["q"], tokens["k"], tokens["v"], gates=gates, state=state)

    def _run_packed(self, tokens: dict[str, Tensor], turn: Turn, bounds: list[int]) -> tuple[Tensor, Any]:
        """Run sequences one after another; states that keep pairs are joined only if they keep as many."""
        outputs, after = [tokens["v"].new_zeros(tokens["v"][:, : bounds[0]].shape)], []
        for n, (start, stop) in enumerate(pairwise(bounds)):
            past = None if turn.past is None else states.select(turn.past.memory, [n])
            o, state = self._run({name: x[:, start:stop] for name, x in tokens.items()}, past)
            outputs.append(o)
            after.append(state)
        outputs.append(tokens["v"].new_zeros(tokens["v"][:, bounds[-1] :].shape))
        shapes = {tuple(x.shape for x in pytree.tree_leaves(state) if x is not None) for state in after}
        if len(shapes) > 1:
            raise ValueError(f"a recipe that keeps its past takes sequences of one length; got {bounds[:8]}. "
                             "Run them one by one.")  # fmt: skip
        return torch.cat(outputs, 1), pytree.tree_map(lambda *x: x[0] if x[0] is None else torch.cat(x), *after)
