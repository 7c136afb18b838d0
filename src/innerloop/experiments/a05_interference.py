"""A5: softmax attention is kernel regression; linear attention is least squares with a term deleted, unbiased."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from innerloop import ops
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BANDWIDTH = 0.4
PAIRS, KEY_WIDTH, VALUE_WIDTH = 32, 64, 16
TRIALS, SLICE = 16384, 2048
GROUPS = tuple(4**i for i in range(6))


def kernel_regression(q: np.ndarray, k: np.ndarray, v: np.ndarray, bandwidth: float) -> np.ndarray:
    """Average the values seen so far by a Gaussian of the distance between query and key, one token at a time."""
    rows = []
    for t in range(len(q)):
        distance = ((q[t] - k[: t + 1]) ** 2).sum(-1)
        weight = np.exp(-distance / (2 * bandwidth**2))
        rows.append(weight @ v[: t + 1] / weight.sum())
    return np.stack(rows)


def identity_deviation(generator: torch.Generator) -> float:
    """Compare softmax attention at unit queries and keys with the Gaussian smoother, in float64."""
    q, k, v = (torch.randn(64, width, generator=generator, dtype=torch.float64) for width in (8, 8, 4))
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    # On the unit sphere |q - k|² = 2 - 2 q·k, and the constant cancels in the quotient.
    o, _ = ops.softmax_attention(q[None, :, None], k[None, :, None], v[None, :, None], scale=BANDWIDTH**-2)
    truth = kernel_regression(q.numpy(), k.numpy(), v.numpy(), BANDWIDTH)
    return float(np.abs(o[0, :, 0].numpy() - truth).max() / np.abs(truth).max())


def draw_interference(generator: torch.Generator, v: torch.Tensor, trials: int) -> torch.Tensor:
    """Recall the first of many pairs under random unit keys; return what the read adds to its value."""
    k = F.normalize(torch.randn(trials, PAIRS, 1, KEY_WIDTH, generator=generator), dim=-1)
    q = k[:, :1].expand_as(k)
    o, _ = ops.linear_attention(q, k, v[None, :, None].expand(trials, -1, 1, -1), scale=1.0)
    return (o[:, -1, 0] - v[0]).double()


def exact_error(generator: torch.Generator, v: torch.Tensor) -> float:
    """Put the deleted covariance back: the error of least squares on the same read."""
    k = F.normalize(torch.randn(16, PAIRS, 1, KEY_WIDTH, generator=generator, dtype=torch.float64), dim=-1)
    q, v = k[:, :1].expand_as(k), v.double()[None, :, None].expand(16, -1, 1, -1)
    o, _ = ops.recursive_least_squares(q, k, v, ridge=1e-9)
    return (o[:, -1, 0] - v[:, 0, 0]).norm(dim=-1).max().item()


def run(settings: Settings) -> Result:
    """Check the identity, then average the interference over more and more draws of the keys."""
    generator = torch.Generator().manual_seed(5)
    deviation = identity_deviation(generator)
    v = F.normalize(torch.randn(PAIRS, VALUE_WIDTH, generator=generator), dim=-1)
    slices = []
    for start in range(0, TRIALS, SLICE):
        slices.append(draw_interference(generator, v, SLICE))
        settings.progress((start + SLICE) / TRIALS)
    interference = torch.cat(slices)
    means = [interference.view(-1, size, VALUE_WIDTH).mean(1) for size in GROUPS]
    return {
        "identity": deviation,
        "trials": list(GROUPS),
        "mean_error": [mean.square().sum(-1).mean().sqrt().item() for mean in means],
        "exact_error": exact_error(generator, v),
    }


def slope(result: Result) -> float:
    """Fit the exponent of the mean error over the number of trials."""
    return float(np.polyfit(np.log(result["trials"]), np.log(result["mean_error"]), 1)[0])


def law() -> float:
    """Return the size of one draw's interference: each of n - 1 unit values enters with variance 1/d."""
    return math.sqrt((PAIRS - 1) / KEY_WIDTH)


def check(result: Result) -> None:
    """The identity to rounding, a single draw at the crowding law, and a mean that falls as 1/sqrt(trials)."""
    assert result["identity"] <= 1e-12, f"softmax attention is {result['identity']:.1e} from kernel regression"
    single = result["mean_error"][0]
    assert abs(single / law() - 1) < 0.02, f"one draw errs by {single:.3f}, the law says {law():.3f}"
    assert abs(slope(result) + 0.5) < 0.05, f"the mean error falls as trials^{slope(result):.3f}, wanted -0.5"
    assert result["exact_error"] < 1e-6, f"least squares errs by {result['exact_error']:.1e} on the same read"


def tables(result: Result) -> list[Table]:
    """The identity and the mean interference."""
    rows: list[tuple[str | int | float, ...]] = [
        (trials, f"{error:.4f}", f"{law() / math.sqrt(trials):.4f}")
        for trials, error in zip(result["trials"], result["mean_error"], strict=True)
    ]
    note = (
        f"Fitted exponent {slope(result):.3f}. Softmax attention against the Gaussian smoother: "
        f"{result['identity']:.1e} relative. Least squares, the covariance put back: {result['exact_error']:.1e}. "
        "The document states both facts and prints no number."
    )
    columns = ("draws of the keys averaged", "size of the mean error", "sqrt((n - 1) / d / draws)")
    return [Table("Interference: variance, not bias", columns, rows, note)]


def _draw(result: Result, axes: Axes) -> None:
    axes.loglog(result["trials"], result["mean_error"], "o", color="C0", label="measured")
    expected = [law() / math.sqrt(trials) for trials in result["trials"]]
    axes.loglog(result["trials"], expected, color="C1", label="((n − 1) / d / draws)^½")
    axes.set(xlabel="draws of the keys averaged", ylabel="size of the mean error", title="Interference averages out")
    axes.legend()


def figures(result: Result) -> list[Figure]:
    """Show the mean error over the number of draws."""
    caption = f"Recall of one of {PAIRS} pairs by linear attention, keys of width {KEY_WIDTH}: no bias is left over."
    return [Figure("Unbiased in expectation", caption, partial(_draw, result))]


EXPERIMENT = Experiment(
    name="A5",
    title="What attention regresses",
    claim="Softmax attention is the Nadaraya-Watson estimator; linear attention is least squares without the inverse "
    "covariance, unbiased in expectation for random unit keys.",
    source="Dive into Deep Learning §12.6, Learning at Test Time: the reveal",
    setting=f"Identity: 64 unit queries and keys of width 8, float64, bandwidth {BANDWIDTH}. Interference: {PAIRS} "
    f"unit values, random unit keys of width {KEY_WIDTH}, {TRIALS:,} draws, seed 5.",
    band="Identity within 1e-12; one draw within 2% of the law; mean error falls as draws to the -0.5 (within 0.05).",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=1.1,
)
