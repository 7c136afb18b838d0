"""Time memories that are networks against their own token loops and, where it is installed, titans-pytorch.

Everything runs in one process, the contestants in turn; a time is the least of ``--repeat`` rounds. Processor time
stands beside wall time: on a machine that others use it is the one to compare.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from innerloop import nn, ops

Work = Callable[[], Tensor]


def titans(length: int, form: str) -> Work:
    """Return the op at B=4, D=256, memory 256-1024-256, mini-batch 64."""
    q, k, v = (torch.nn.functional.normalize(torch.randn(4, length, 1, 256), dim=-1).requires_grad_() for _ in range(3))
    theta, eta, alpha = ((size * torch.rand(4, length, 1)).requires_grad_() for size in (1 / 64, 0.9, 0.01))
    weights = tuple((torch.randn(1, a, b) / a**0.5).requires_grad_() for a, b in ((256, 1024), (1024, 256)))
    return lambda: ops.titans(q, k, v, theta=theta, eta=eta, alpha=alpha, weights=weights, form=form)[0]


def ttt(length: int, form: str) -> Work:
    """Return TTT-Linear at B=1, four heads of 64."""
    q, k, v = (torch.randn(1, length, 4, 64, requires_grad=True) for _ in range(3))
    weights = (0.02 * torch.randn(4, 64, 64)).requires_grad_(), torch.zeros(4, 64, requires_grad=True)
    norm = {"norm_weight": torch.ones(4, 64), "norm_bias": torch.zeros(4, 64)}
    lr = torch.rand(1, length, 4) / 64
    return lambda: ops.ttt(q, k, v, lr=lr, weights=weights, form=form, **norm)[0]


def layer(length: int) -> Work:
    """Return our layer with its projections, as the peer's has them."""
    module, x = nn.Titans(256, 1, taps=0), torch.randn(4, length, 256)
    return lambda: module(x)[0]


def peer(length: int) -> Work | None:
    """Return titans-pytorch's memory at the same widths, its gradient following the weights; None without it."""
    try:
        from titans_pytorch import NeuralMemory  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    model = {"depth": 2, "expansion_factor": 4.0}
    module = NeuralMemory(dim=256, chunk_size=64, batch_size=64, default_model_kwargs=model)
    x = torch.randn(4, length, 256)
    return lambda: module(x)[0]


def contestants(length: int) -> dict[str, tuple[Work | None, float]]:
    """Return what is run by name, and what a time is multiplied by to be that of ``length`` tokens."""
    short = max(64, length // 16)
    return {
        "titans, chunk": (titans(length, "chunk"), 1.0),
        f"titans, loop of {short}": (titans(short, "recurrent"), length / short),
        "nn.Titans": (layer(length), 1.0),
        "titans-pytorch": (peer(length), 1.0),
        "ttt, chunk": (ttt(2 * length, "chunk"), 1.0),
        f"ttt, loop of {2 * short}": (ttt(2 * short, "recurrent"), length / short),
    }


def main() -> int:
    """Run the rounds and print the least of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--length", type=int, default=1024, help="tokens (twice as many for ttt)")
    parser.add_argument("--repeat", type=int, default=3, help="rounds")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    best: dict[str, tuple[float, float]] = {}
    for _ in range(arguments.repeat):
        for name, (work, times) in contestants(arguments.length).items():
            if work is None:
                continue
            wall, processor = time.perf_counter(), time.process_time()
            work().sum().backward()
            took = times * (time.perf_counter() - wall), times * (time.process_time() - processor)
            best[name] = min(best.get(name, took), took, key=lambda x: x[1])
    print(f"forward and backward, float32, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name, (wall, processor) in best.items():
        print(f"{name:<24}{wall:>8.2f} s wall {processor:>8.2f} s processor")
    return 0


if __name__ == "__main__":
    sys.exit(main())
