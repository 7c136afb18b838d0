"""A8: Longhorn's gate is the closed form of a small optimisation problem solved for every token."""

from __future__ import annotations

import torch
from torch import Tensor

from innerloop import ops, testing
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table
from innerloop.recipe import ImplicitStep, LinearMap, Recipe, Uniform

INSTANCES, DESCENDED, STEPS = 200, 5, 2000
KEY_WIDTH, VALUE_WIDTH = 16, 4
LINEAR_SOLVE, DESCENT = 3.99e-06, 1.34e-07
COMPARED = {
    "linear_solve": f"the op and an exact linear solve, {INSTANCES} instances",
    "descent": f"the op and {STEPS:,} explicit gradient steps, {DESCENDED} instances",
    "recipe": f"the recipe's implicit step and the linear solve, {INSTANCES} instances",
}
BARS = {"float32": 1e-5, "float64": 1e-12}


def draw(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw a memory, a key, a value and a write strength from 0.01 to 100 for every instance."""
    generator = torch.Generator().manual_seed(8)
    state = torch.randn(INSTANCES, KEY_WIDTH, VALUE_WIDTH, generator=generator, dtype=torch.float64)
    k = torch.randn(INSTANCES, KEY_WIDTH, generator=generator, dtype=torch.float64)
    v = torch.randn(INSTANCES, VALUE_WIDTH, generator=generator, dtype=torch.float64)
    beta = 10 ** (4 * torch.rand(INSTANCES, generator=generator, dtype=torch.float64) - 2)
    return state.to(dtype), k.to(dtype), v.to(dtype), beta.to(dtype)


def write(state: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Write one pair into every instance through the op."""
    key = k[:, None]
    _, after = ops.step("longhorn", key, key, v[:, None], beta=beta[:, None], state=state[:, None])
    return after[:, 0]


def write_by_recipe(state: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Write one pair into every instance by the executed recipe."""
    recipe = Recipe(Uniform(), LinearMap(), ImplicitStep(strength=None))
    start = recipe.start(parameters=(state[:, None],))
    key, gates = k[:, None], {"solver.strength": beta[:, None]}
    _, after = recipe.step(key, key, v[:, None], gates=gates, state=start)
    return after.parameters[0][:, 0]


def solve(state: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Set the objective's gradient to zero: (I + beta k k^T) s = s' + beta k v^T."""
    outer = beta[:, None, None] * k[:, :, None]
    return torch.linalg.solve(torch.eye(k.shape[-1], dtype=k.dtype) + outer * k[:, None], state + outer * v[:, None])


def descend(state: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Descend on the stated objective by autograd, at the rate of its largest curvature."""
    rate = (0.5 / (1 + beta * k.square().sum(-1)))[:, None, None]
    s = state.clone().requires_grad_()
    for _ in range(STEPS):
        error = torch.einsum("nkv,nk->nv", s, k) - v
        objective = (s - state).square().sum() + (beta * error.square().sum(-1)).sum()
        (slope,) = torch.autograd.grad(objective, s)
        s = (s - rate * slope).detach().requires_grad_()
    return s.detach()


def run(settings: Settings) -> Result:
    """Compare the op's write with both truths, in both dtypes."""
    result: Result = {}
    for dtype in (torch.float32, torch.float64):
        instances = draw(dtype)
        exact = solve(*(tensor.double() for tensor in instances))
        few = tuple(tensor[:DESCENDED] for tensor in instances)
        result[str(dtype).removeprefix("torch.")] = {
            "linear_solve": testing.error(write(*instances), exact),
            "descent": testing.error(write(*few), descend(*few)),
            "recipe": testing.error(write_by_recipe(*instances), exact),
        }
        settings.progress(len(result) / 2)
    return result


def check(result: Result) -> None:
    """Both truths must be met to rounding."""
    for dtype, bar in BARS.items():
        for name, error in result[dtype].items():
            assert error <= bar, f"{COMPARED[name]}: {error:.1e} in {dtype}, wanted <= {bar:.0e}"


def tables(result: Result) -> list[Table]:
    """Deviation from both truths beside the document's."""
    printed = {"linear_solve": f"{LINEAR_SOLVE:.2e}", "descent": f"{DESCENT:.2e}", "recipe": "--"}
    rows: list[tuple[str | int | float, ...]] = [
        (COMPARED[name], theirs, f"{result['float32'][name]:.2e}", f"{result['float64'][name]:.2e}")
        for name, theirs in printed.items()
    ]
    columns = ("compared", "document (float32)", "ours, float32", "ours, float64")
    return [Table("Closed form and argmin", columns, rows, "Ours: relative to the truth's largest entry.")]


def figures(result: Result) -> list[Figure]:
    """No picture says more than the four numbers."""
    return []


EXPERIMENT = Experiment(
    name="A8",
    title="The gate is a theorem",
    claim="Longhorn's write is the closed form of argmin |s - s'|² + beta (s·k - v)².",
    source="Dive into Deep Learning §12.6, Learning at Test Time: closed form == argmin",
    setting=f"{INSTANCES} random instances against an exact linear solve in float64, {DESCENDED} of them against "
    f"{STEPS:,} gradient steps on the objective; keys of width {KEY_WIDTH}, {VALUE_WIDTH} values, beta from 0.01 to "
    "100, seed 8; the write through `ops.step` and through the recipe.",
    band="At most 1e-5 in float32 and 1e-12 in float64, relative.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=2.0,
)
