"""Memories that are networks, timed: against their own token loops, against the documents', against titans-pytorch."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from innerloop import nn, ops
from innerloop.bench.compare import Pace
from innerloop.bench.contenders import Absent
from innerloop.bench.measure import Work, interleaved
from innerloop.bench.rows import Finding, Row
from innerloop.bench.workload import Workload
from innerloop.checks import Form
from innerloop.experiments.blocks.hope import HopeBlock
from innerloop.experiments.blocks.hope_layer import OPTIONS, HopeLayerBlock
from innerloop.experiments.blocks.recall import BATCH, KEYS, PAIRS, RATE, VALUES, draw

_PEER = "titans-pytorch"
_TITANS = Workload("titans", "both", B=4, T=1024, H=1, K=256)
_TTT = Workload("ttt", "both", B=1, T=2048, H=4, K=64)
_BLOCK = Workload("hope", "both", B=BATCH, T=2 * PAIRS + 1, H=1, K=48)


@dataclass(frozen=True)
class NetworkRow(Row):
    """Someone else's time over ours."""

    what: str = ""
    ours: Callable[[Workload], Work] | None = None
    other: Callable[[Workload], Work] | None = None
    shorter: int = 1
    """The other runs so many times fewer tokens, and its time counts as often."""
    beside: tuple[tuple[str, Callable[[Workload], Work]], ...] = ()
    """What is timed for its own sake."""
    aim_unit: ClassVar[str] = "×"

    @property
    def title(self) -> str:
        """What is measured."""
        return f"{super().title}, {self.what}"

    def find(self, pace: Pace) -> Finding:
        """Time all in turn, in this process."""
        assert self.ours is not None and self.other is not None
        try:
            other = self.other(self.workload.at(T=self.workload.T // self.shorter))
        except Absent as error:
            return {"value": None, "aim_value": None, "note": str(error)}
        works: dict[str, Work] = {"ours": self.ours(self.workload), "other": other}
        works |= {name: make(self.workload) for name, make in self.beside}
        times = interleaved(works, seconds=pace.seconds)
        took = {name: found["median"] for name, found in times.items()}
        took["other"] *= self.shorter
        ratio = took["other"] / took["ours"]
        words = [f"ours {1e3 * took['ours']:.0f} ms, other {1e3 * took['other']:.0f} ms"]
        words += [f"{name} {1e3 * took[name]:.0f} ms" for name, _ in self.beside]
        return {"value": ratio, "aim_value": ratio, "times": times, "note": ", ".join(words)}


def _both(answer: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Work:
    """Return a forward and a backward pass."""
    leaves = list(leaves)

    def work() -> object:
        return torch.autograd.grad(answer().sum(), leaves, allow_unused=True)

    return work


def titans_op(workload: Workload, form: Form = "chunk") -> Work:
    """Return the op with a memory of K, 4K, K and mini-batches of 64."""
    generator = torch.Generator().manual_seed(0)
    B, T, K = workload.B, workload.T, workload.K
    q, k, v = (F.normalize(torch.randn(B, T, 1, K, generator=generator), dim=-1) for _ in range(3))
    theta, eta, alpha = (size * torch.rand(B, T, 1, generator=generator) for size in (1 / 64, 0.9, 0.01))
    weights = [torch.randn(1, a, b, generator=generator) / a**0.5 for a, b in ((K, 4 * K), (4 * K, K))]
    q, k, v, theta, eta, alpha, first, second = leaves = [
        x.requires_grad_() for x in (q, k, v, theta, eta, alpha, *weights)
    ]

    def answer() -> Tensor:
        return ops.titans(q, k, v, theta=theta, eta=eta, alpha=alpha, weights=(first, second), form=form)[0]

    return _both(answer, leaves)


def titans_loop(workload: Workload) -> Work:
    """Return the op's token loop."""
    return titans_op(workload, "recurrent")


def titans_layer(workload: Workload) -> Work:
    """Return our layer at the sizes of the peer's, projections included."""
    layer = nn.Titans(workload.K, 1, taps=0)
    x = torch.randn(workload.B, workload.T, workload.K, generator=torch.Generator().manual_seed(0))
    return _both(lambda: layer(x)[0], list(layer.parameters()))


def titans_peer(workload: Workload) -> Work:
    """Return the memory of titans-pytorch at the same widths, its gradient following the weights every 64 tokens."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # its own, of torch's
            memory = importlib.import_module("titans_pytorch").NeuralMemory
    except ImportError as error:
        raise Absent(f"{_PEER} is not installed: pip install 'innerloop[bench]' ({error})") from None
    model = {"depth": 2, "expansion_factor": 4.0}
    layer = memory(dim=workload.K, chunk_size=64, batch_size=64, default_model_kwargs=model)
    x = torch.randn(workload.B, workload.T, workload.K, generator=torch.Generator().manual_seed(0))
    return _both(lambda: layer(x)[0], list(layer.parameters()))


def ttt_op(workload: Workload, form: Form = "chunk") -> Work:
    """Return TTT-linear with mini-batches of 16."""
    generator = torch.Generator().manual_seed(0)
    B, T, H, K = workload.B, workload.T, workload.H, workload.K
    q, k, v = (torch.randn(B, T, H, K, generator=generator) for _ in range(3))
    lr, weight = torch.rand(B, T, H, generator=generator) / K, 0.02 * torch.randn(H, K, K, generator=generator)
    q, k, v, lr, weight, bias = leaves = [x.requires_grad_() for x in (q, k, v, lr, weight, torch.zeros(H, K))]
    scale, shift = torch.ones(H, K), torch.zeros(H, K)

    def answer() -> Tensor:
        return ops.ttt(q, k, v, lr=lr, weights=(weight, bias), norm_weight=scale, norm_bias=shift, form=form)[0]

    return _both(answer, leaves)


def ttt_loop(workload: Workload) -> Work:
    """Return its token loop."""
    return ttt_op(workload, "recurrent")


class LoopBlock(HopeBlock):
    """The documents' block with its memory written token by token, as they write it."""

    def _remember(self, x: Tensor) -> Tensor:
        q, k = F.normalize(self.query(x), dim=-1), F.normalize(self.key(x), dim=-1)
        v = self.target(self.value(x))
        theta, keep = torch.sigmoid(self.rate(x)), torch.sigmoid(self.keep(x))
        memory = x.new_zeros(x.shape[0], v.shape[-1], k.shape[-1])
        for t in range(x.shape[1]):
            error = torch.einsum("bvk,bk->bv", memory, k[:, t]) - v[:, t]
            memory = keep[:, t, :, None] * memory - theta[:, t, :, None] * error[:, :, None] * k[:, t, None, :]
        return torch.einsum("bvk,bk->bv", memory, q[:, -1])


def _step(block: torch.nn.Module) -> Work:
    """Return a training step on batches that are drawn already."""
    generator = torch.Generator().manual_seed(0)
    batches = [draw(BATCH, PAIRS, generator) for _ in range(4)]
    optimizer, turn = torch.optim.Adam(block.parameters(), lr=RATE, fused=True), [0]

    def work() -> None:
        sequence, answer = batches[turn[0] % len(batches)]
        turn[0] += 1
        optimizer.zero_grad()
        F.cross_entropy(block(sequence), answer).backward()
        optimizer.step()

    return work


def block_op(workload: Workload) -> Work:
    """Return a step of C1's block."""
    del workload
    return _step(HopeBlock(KEYS + VALUES, VALUES))


def block_loop(workload: Workload) -> Work:
    """Return the same, through the documents' loop."""
    del workload
    return _step(LoopBlock(KEYS + VALUES, VALUES))


def layer_step(workload: Workload) -> Work:
    """Return a step with the library's layer in the block's place."""
    del workload
    return _step(HopeLayerBlock(**OPTIONS))


NETWORK_ROWS: tuple[NetworkRow, ...] = (
    NetworkRow(_TITANS, 1.5, 2.5, what="layer against titans-pytorch", ours=titans_layer, other=titans_peer),
    NetworkRow(_TITANS, 14.0, 28.0, what="op against its token loop", ours=titans_op, other=titans_loop, shorter=16),
    NetworkRow(_TTT, 10.0, 20.0, what="op against its token loop", ours=ttt_op, other=ttt_loop, shorter=16),
    NetworkRow(
        _BLOCK, 3.0, 5.0, what="step of C1's block against its loop", ours=block_op, other=block_loop,
        beside=(("the step with Hope", layer_step),),
    ),
)  # fmt: skip
"""By the rule that is timed."""
