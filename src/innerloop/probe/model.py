"""The small model around a layer that is probed: an embedding, the layer, a feed-forward, a head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from innerloop.data.tasks import Task
from innerloop.probe.contender import output


class ProbeModel(nn.Module):
    """Layers, each behind a norm, beside the stream and followed by a feed-forward, between an embedding and a head.

    Args:
        task: Which tells what goes in and what comes out.
        layers: Modules from ``[B, T, D]`` to the same shape, or to that and a state.
        width: D.
        feed_forward: Inner width of the feed-forwards as a multiple of D; 0 leaves them out.

    Example:
        >>> import torch
        >>> from innerloop import nn
        >>> from innerloop.data.tasks import task
        >>> from innerloop.probe import ProbeModel
        >>> model = ProbeModel(task("parity"), [nn.DeltaNet(16, 2)], 16)
        >>> model(torch.tensor([[0, 1, 1]])).shape
        torch.Size([1, 3, 2])
    """

    def __init__(self, task: Task, layers: Sequence[nn.Module], width: int, feed_forward: int = 2) -> None:
        """Draw the weights of all but the layers, which have theirs."""
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, width) for size in task.channels)
        self.entry = None if task.channels else nn.Linear(task.features, width)
        self.layers = nn.ModuleList(layers)
        self.layer_norms = nn.ModuleList(nn.RMSNorm(width) for _ in layers)
        inner = feed_forward * width
        self.feed_forwards = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
            for _ in layers
            if inner
        )
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, task.outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return answers ``[B, T, outputs]`` to inputs as the task draws them."""
        x = self.embedded(inputs)
        for n, layer in enumerate(self.layers):
            x = x + output(layer(self.layer_norms[n](x)))
            if self.feed_forwards:
                x = x + self.feed_forwards[n](x)
        return self.head(self.norm(x))

    def embedded(self, inputs: Tensor) -> Tensor:
        """Return what goes into the first layer's norm, ``[B, T, D]``."""
        if self.entry is not None:
            return self.entry(inputs)
        channels = inputs[..., None] if len(self.embeddings) == 1 else inputs
        return torch.stack([e(channels[..., n]) for n, e in enumerate(self.embeddings)]).sum(0)

    @torch.no_grad()
    def state_bytes(self, inputs: Tensor) -> int | None:
        """Return the bytes of all layers' states after inputs ``[B, T]``; None if a layer returns none."""
        x, total = self.embedded(inputs), 0
        for n, layer in enumerate(self.layers):
            returned = layer(self.layer_norms[n](x))
            if not isinstance(returned, tuple) or len(returned) < 2:
                return None
            total += sum(s.numel() * s.element_size() for s in pytree.tree_leaves(returned[1]) if _is_tensor(s))
            x = x + output(returned)
            if self.feed_forwards:
                x = x + self.feed_forwards[n](x)
        return total


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, Tensor)
