"""A6: a spectrum of solvers on one data set, one feature space and one ridge objective."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from innerloop import ops
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table
from innerloop.recipe import Exact, FeatureMap, GradientStep, KernelSmoother, QueryKernel, Recipe, Uniform

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS, BUMPS, WIDTH, NOISE = 64, 24, 0.3, 0.3
RIDGE, RATE, BANDWIDTH = 0.5, 0.1, 0.08
PASSES, SETTLING = (1, 5, 30), 300
SOLVERS = (
    "Nadaraya-Watson",
    *(f"online GD, {n} pass{'es' if n > 1 else ''}" for n in PASSES),
    f"online GD, {SETTLING} more passes at a falling rate",
    "batch ridge",
)
DOCUMENT = {
    "Nadaraya-Watson": ("0.027", "--", "0.135"),
    "online GD, 1 pass": ("0.070", "8.916", "0.277"),
    "online GD, 5 passes": ("0.027", "6.238", "0.100"),
    "online GD, 30 passes": ("0.022", "6.134", "0.077"),
    "batch ridge": ("0.010", "5.860", "0.000"),
}


def truth(x: Tensor) -> Tensor:
    """The function behind the data."""
    return torch.sin(2 * x)


def bumps(x: Tensor) -> Tensor:
    """Map inputs ``[..., 1]`` to unit vectors of Gaussian bumps, ``[..., F]``, the one feature space."""
    centres = torch.linspace(0, 5, BUMPS, dtype=x.dtype)
    height = torch.exp(-0.5 * ((x - centres) / WIDTH) ** 2)
    return height / height.norm(dim=-1, keepdim=True)


def gaussian(q: Tensor, k: Tensor) -> Tensor:
    """The kernel of the smoother, relative to the largest weight so that no query is left without any."""
    score = -0.5 * ((q - k) / BANDWIDTH).square().sum(-1)
    return (score - score.amax(-1, keepdim=True)).exp()


@dataclass(frozen=True)
class Data:
    """The one data set, in a random order, and where a fit is looked at."""

    x: Tensor
    """Inputs, ``[64, 1]``."""
    y: Tensor
    """Targets, ``[64, 1]``."""
    grid: Tensor
    """Test inputs, ``[201, 1]``."""
    order: Tensor
    """Indices into the data for all passes, each a fresh permutation, ``[passes, 64]``."""

    def objective(self, weights: Tensor) -> float:
        """The shared ridge objective at weights ``[F, 1]``."""
        fit = bumps(self.x) @ weights - self.y
        return 0.5 * (fit.square().sum() + RIDGE * weights.square().sum()).item()


def draw_data(seed: int = 6) -> Data:
    """Draw the data and the order of the passes."""
    generator = torch.Generator().manual_seed(seed)
    x = 5 * torch.rand(POINTS, 1, generator=generator, dtype=torch.float64)
    y = truth(x) + NOISE * torch.randn(POINTS, 1, generator=generator, dtype=torch.float64)
    order = torch.stack([torch.randperm(POINTS, generator=generator) for _ in range(PASSES[-1] + SETTLING)])
    return Data(x, y, torch.linspace(0, 5, 201, dtype=torch.float64)[:, None], order)


def smooth(data: Data, at: Tensor) -> Tensor:
    """Let the Nadaraya-Watson recipe store the data and answer at inputs ``[N, 1]``, one row of the batch for each."""
    recipe = Recipe(QueryKernel(gaussian), KernelSmoother(), Exact())
    q, k, v = (x[:, :, None].expand(len(at), POINTS, 1, 1) for x in (at[:, None], data.x[None], data.y[None]))
    return recipe.run(q, k, v)[0][:, -1, 0]


def descend_recipe(data: Data, passes: int) -> Tensor:
    """Fit by online gradient descent on the ridge objective, each point carrying its share; through the recipe."""
    recipe = Recipe(Uniform(), FeatureMap(bumps), GradientStep(rate=RATE, decay=RATE * RIDGE / POINTS))
    visited = data.order[:passes].flatten()
    x, y = (tensor[visited][None, :, None] for tensor in (data.x, data.y))
    return recipe.run(x, x, y)[1].parameters[0][0, 0]


def descend(data: Data, passes: int) -> Tensor:
    """Fit the same way through the op, at a rate that falls as 1 over the pass after the thirtieth."""
    visited = data.order[:passes].flatten()
    k, v = (tensor[visited][None, :, None] for tensor in (bumps(data.x), data.y))
    falling = PASSES[-1] / torch.arange(1, passes + 1, dtype=torch.float64)
    theta = RATE * falling.clamp(max=1).repeat_interleave(POINTS)[None, :, None]
    # The momentum rule takes its error before it forgets: without momentum, the gradient step on error plus ridge.
    _, state = ops.momentum_delta_rule(
        k, k, v, theta=theta, eta=torch.zeros_like(theta), alpha=theta * RIDGE / POINTS, output_final_state=True
    )
    assert state is not None
    return state.S[0, 0]


def solve(data: Data) -> Tensor:
    """Fit the batch ridge through the recipe; its state after the last point is the optimum over all."""
    recipe = Recipe(Uniform(), FeatureMap(bumps), Exact(ridge=RIDGE))
    x, y = (tensor[None, :, None] for tensor in (data.x, data.y))
    return recipe.run(x, x, y)[1].parameters[0][0, 0]


def normal_equations(data: Data) -> Tensor:
    """The optimum once more, written out."""
    features = bumps(data.x)
    return torch.linalg.solve(features.mT @ features + RIDGE * torch.eye(BUMPS), features.mT @ data.y)


def run(settings: Settings) -> Result:
    """Fit the data by every solver."""
    data = draw_data()
    optimum = solve(data)
    descents = [descend(data, passes) for passes in (*PASSES, PASSES[-1] + SETTLING)]
    settings.progress(0.5)
    recipes = [descend_recipe(data, passes) for passes in PASSES[:2]]
    features, target = bumps(data.grid), truth(data.grid)
    best = features @ optimum
    weights = dict(zip(SOLVERS[1:], (*descents, optimum), strict=True))
    fits = {SOLVERS[0]: smooth(data, data.grid), **{name: features @ w for name, w in weights.items()}}
    settings.progress(1.0)
    return {
        "mse": {name: (fit - target).square().mean().item() for name, fit in fits.items()},
        "objective": {name: data.objective(w) for name, w in weights.items()},
        "distance": {name: (fit - best).square().mean().sqrt().item() for name, fit in fits.items()},
        "recipe_and_op": max((a - b).abs().max().item() for a, b in zip(recipes, descents, strict=False)),
        "recipe_and_equations": (optimum - normal_equations(data)).abs().max().item(),
    }


def check(result: Result) -> None:
    """More passes come closer in objective and distance and end at the optimum; one pass is worst in test error."""
    path = SOLVERS[1:]
    for measure in ("objective", "distance"):
        numbers = [result[measure][name] for name in path]
        falls = all(later < earlier for earlier, later in itertools.pairwise(numbers))
        assert falls, f"the {measure} should fall with every pass down to the ridge optimum: {numbers}"
    excess = result["objective"][path[-2]] / result["objective"][path[-1]] - 1
    assert excess < 1e-3, f"the last passes should reach the optimum; the objective is {excess:.1e} above it"
    worst = max(result["mse"], key=result["mse"].__getitem__)
    assert worst == "online GD, 1 pass", f"one pass should have the largest test error, not {worst}: {result['mse']}"
    for name in ("recipe_and_op", "recipe_and_equations"):
        assert result[name] < 1e-9, f"{name.replace('_', ' ')} differ by {result[name]:.1e}, wanted < 1e-9"


def tables(result: Result) -> list[Table]:
    """Test error, objective and distance to the optimum, by solver."""
    rows: list[tuple[str | int | float, ...]] = []
    for name in SOLVERS:
        theirs = DOCUMENT.get(name, ("not run",) * 3)
        objective = f"{result['objective'][name]:.3f}" if name in result["objective"] else "--"
        ours = (f"{result['mse'][name]:.3f}", objective, f"{result['distance'][name]:.3f}")
        rows.append((name, *(cell for pair in zip(theirs, ours, strict=True) for cell in pair)))
    columns = ("solver", "test MSE, document", "ours", "objective, document", "ours", "distance, document", "ours")
    note = (
        "The document does not print its data; ours are stated in the setting, so orderings are compared, not digits. "
        "Distance is the root mean square between a fit and the ridge fit on the test grid."
    )
    return [Table("Five solvers, and the way to the optimum", columns, rows, note)]


def _draw(result: Result, axes: Axes) -> None:
    excess = [result["objective"][name] - result["objective"][SOLVERS[-1]] for name in SOLVERS[1:-1]]
    distance = [result["distance"][name] for name in SOLVERS[1:-1]]
    passes = (*PASSES, PASSES[-1] + SETTLING)
    axes.loglog(passes, excess, "o-", color="C0", label="objective above the optimum")
    axes.loglog(passes, distance, "s-", color="C1", label="distance to the ridge fit")
    axes.axvline(PASSES[-1], color="C2", linestyle=":", label="from here the rate falls")
    axes.set(xlabel="passes over the data", ylabel="gap", title="More passes, nearer the optimum")
    axes.legend()


def figures(result: Result) -> list[Figure]:
    """Show how the gap closes with the passes."""
    caption = "Online descent on the ridge objective: a constant rate leaves a gap, a falling one closes it."
    return [Figure("From one step to the optimum", caption, partial(_draw, result))]


EXPERIMENT = Experiment(
    name="A6",
    title="The spectrum of solvers",
    claim="On one data set, feature space and ridge objective more passes fall monotonically to the batch optimum, and "
    "one online pass underfits.",
    source="Dive into Deep Learning §12.6, Learning at Test Time: the spectrum, measured",
    setting=f"{POINTS} points of sin 2x on [0, 5] with noise {NOISE}, seed 6; {BUMPS} Gaussian bumps of width {WIDTH}, "
    f"unit length; ridge {RIDGE}; rate {RATE}; smoother of bandwidth {BANDWIDTH}; float64, through recipes and "
    "`ops.momentum_delta_rule`.",
    band="Objective and distance fall with passes and reach the optimum (0.1%); one pass is worst in test error.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=1.0,
)
