"""A12: on a drifting truth uniform least squares goes stale; decay tracks, and so does one implicit step a token."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from innerloop import ops
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STREAMS, LENGTH, WIDTH, LAST = 5, 2000, 8, 500
DRIFT, NOISE = 0.08, 0.1
GAMMA, BETA, RIDGE = 0.95, 1.0, 1e-3
ESTIMATORS = ("uniform least squares", "decayed least squares", "implicit step")
DOCUMENT = (0.99, 0.29, 0.30)
WORLDS = ("drifting", "stationary")


def draw_truth(generator: torch.Generator, drift: float) -> Tensor:
    """Walk at random on the unit sphere: a step of size ``drift``, then back to unit length. ``[streams, T, K]``."""
    truth = torch.randn(STREAMS, WIDTH, generator=generator, dtype=torch.float64)
    path = []
    for _ in range(LENGTH):
        step = torch.randn(STREAMS, WIDTH, generator=generator, dtype=torch.float64) / math.sqrt(WIDTH)
        truth = truth + drift * step
        truth = truth / truth.norm(dim=-1, keepdim=True)
        path.append(truth)
    return torch.stack(path, 1)


def estimates(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Let the three layers learn every stream; return what they hold after every token, ``[streams, T, K]``."""
    # One row of the batch for each basis vector: asked with it, the layer answers one entry of its estimate.
    q = torch.eye(WIDTH, dtype=x.dtype)[None, :, None].expand(STREAMS, -1, LENGTH, -1).reshape(-1, LENGTH, 1, WIDTH)
    k = x.repeat_interleave(WIDTH, 0)[:, :, None]
    v = y.repeat_interleave(WIDTH, 0)[:, :, None, None]
    gate = torch.ones(v.shape[:3], dtype=x.dtype)
    answers = (
        ops.recursive_least_squares(q, k, v, ridge=RIDGE)[0],
        ops.recursive_least_squares(q, k, v, g=math.log(GAMMA) * gate, ridge=RIDGE)[0],
        ops.longhorn(q, k, v, beta=BETA * gate, scale=1.0)[0],
    )
    return {
        name: o.reshape(STREAMS, WIDTH, LENGTH).transpose(1, 2)
        for name, o in zip(ESTIMATORS, answers, strict=True)
    }


def run(settings: Settings) -> Result:
    """Follow a drifting and a resting truth."""
    result: Result = {"stride": 10}
    for world, drift in zip(WORLDS, (DRIFT, 0.0), strict=True):
        generator = torch.Generator().manual_seed(12)
        truth = draw_truth(generator, drift)
        x = torch.randn(truth.shape, generator=generator, dtype=truth.dtype)
        x = x / x.norm(dim=-1, keepdim=True)
        y = (truth * x).sum(-1) + NOISE * torch.randn(truth.shape[:2], generator=generator, dtype=truth.dtype)
        errors = {name: (held - truth).norm(dim=-1).mean(0) for name, held in estimates(x, y).items()}
        result[world] = {
            "last": {name: error[-LAST:].mean().item() for name, error in errors.items()},
            "curve": {name: error[:: result["stride"]].tolist() for name, error in errors.items()},
        }
        settings.progress(0.5 if world == WORLDS[0] else 1.0)
    return result


def check(result: Result) -> None:
    """Under drift uniform weights must lose by three and the other two agree; at rest uniform weights must win."""
    uniform, decayed, implicit = (result["drifting"]["last"][name] for name in ESTIMATORS)
    numbers = f"uniform {uniform:.3f}, decayed {decayed:.3f}, implicit {implicit:.3f}"
    assert uniform >= 3 * max(decayed, implicit), f"uniform should err three times as much under drift: {numbers}"
    assert max(decayed, implicit) <= 1.2 * min(decayed, implicit), f"the other two should agree within 20%: {numbers}"
    uniform, decayed, implicit = (result["stationary"]["last"][name] for name in ESTIMATORS)
    numbers = f"uniform {uniform:.3f}, decayed {decayed:.3f}, implicit {implicit:.3f}"
    assert uniform < min(decayed, implicit) / 3, f"uniform should err least when nothing drifts: {numbers}"


def tables(result: Result) -> list[Table]:
    """Mean error at the end, by estimator and world."""
    rows: list[tuple[str | int | float, ...]] = [
        (name, f"{printed:.2f}", *(f"{result[world]['last'][name]:.3f}" for world in WORLDS))
        for name, printed in zip(ESTIMATORS, DOCUMENT, strict=True)
    ]
    columns = ("estimator", "document", "ours, drifting", "ours, stationary")
    note = (
        f"The document does not print its drift; ours: {WIDTH} weights walk on the unit sphere with steps of size "
        f"{DRIFT}, so errors are relative to the truth's length. Inputs are unit vectors, the noise is {NOISE}."
    )
    return [Table(f"Mean error over the last {LAST} steps", columns, rows, note)]


def _draw(result: Result, *panels: Axes) -> None:
    steps = range(0, LENGTH, result["stride"])
    for axes, world in zip(panels, WORLDS, strict=True):
        for name, color in zip(ESTIMATORS, ("C0", "C1", "C2"), strict=True):
            axes.semilogy(steps, result[world]["curve"][name], color=color, linewidth=1.2, label=name)
        axes.set(xlabel="token", ylabel="distance to the truth", title=f"A {world} truth", ylim=(5e-3, 3))
        axes.legend()


def figures(result: Result) -> list[Figure]:
    """Show the error over time in both worlds."""
    caption = f"Mean of {STREAMS} streams. Forgetting buys tracking under drift and costs accuracy at rest."
    return [Figure("Regression that tracks", caption, partial(_draw, result), panels=2)]


EXPERIMENT = Experiment(
    name="A12",
    title="Regression that tracks a drifting world",
    claim="On a drifting truth uniform least squares goes stale, decayed least squares tracks, and the implicit step "
    "tracks with no solve.",
    source="Dive into Deep Learning §12.6, Learning at Test Time: regression that tracks",
    setting=f"{STREAMS} streams of {LENGTH:,} tokens, {WIDTH} weights walking on the unit sphere with steps of size "
    f"{DRIFT} (0 as the control), unit inputs, noise {NOISE}, seed 12; gamma = {GAMMA}, beta = {BETA:g}, ridge "
    f"{RIDGE}; float64, through `ops.recursive_least_squares` and `ops.longhorn`.",
    band="Uniform at least three times the other two, these within 20% of each other; the reverse at rest.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=1.5,
)
