"""B3: the delta rule in its error form and in its matrix form are one rule."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from innerloop import ops, testing
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LENGTH, WIDTH = 512, 64
DOCUMENT = {"PyTorch": 1.88e-06, "JAX": 1.38e-06}
VALUE_BARS = {"float32": 1e-5, "float64": 1e-12}
GRADIENT_BARS = {dtype: 10 * bar for dtype, bar in VALUE_BARS.items()}
NAMES = ("q", "k", "v", "beta")


def draw_inputs(dtype: torch.dtype) -> list[Tensor]:
    """Draw q, unit k, v ``[1, T, 1, K]`` and beta ``[1, T, 1]``, the same for every dtype, to differentiate by."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, LENGTH, 1, WIDTH, generator=generator) for _ in range(3))
    beta = torch.randn(1, LENGTH, 1, generator=generator).sigmoid()
    return [x.to(dtype).requires_grad_() for x in (q, k / k.norm(dim=-1, keepdim=True), v, beta)]


def matrix_form(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Run S = (I - beta k k^T) S + beta k v^T token by token; read S^T q."""
    eye, rows = torch.eye(WIDTH, dtype=q.dtype), []
    state = torch.zeros(WIDTH, WIDTH, dtype=q.dtype)
    tokens = zip(*(x[0].unbind(0) for x in (q[:, :, 0], k[:, :, 0], v[:, :, 0], beta[:, :, 0])), strict=True)
    for query, key, value, strength in tokens:
        state = (eye - strength * torch.outer(key, key)) @ state + strength * torch.outer(key, value)
        rows.append(query @ state)
    return torch.stack(rows)[None, :, None]


def gradients(o: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Pull a fixed random cotangent back to every input."""
    generator = torch.Generator().manual_seed(1)
    return list(torch.autograd.grad(o, inputs, torch.randn(o.shape, generator=generator).to(o.dtype)))


def run(settings: Settings) -> Result:
    """Compare the op's token loop, which is the error form, with the matrix form, values and gradients."""
    result: Result = {}
    for dtype in (torch.float32, torch.float64):
        inputs = draw_inputs(dtype)
        q, k, v, beta = inputs
        error_form, _ = ops.delta_rule(q, k, v, beta=beta, scale=1.0, form="recurrent")
        matrices = matrix_form(*inputs)
        sampled = zip(error_form[0, ::8].detach(), matrices[0, ::8].detach(), strict=True)
        pulled = zip(NAMES, gradients(error_form, inputs), gradients(matrices, inputs), strict=True)
        result[str(dtype).removeprefix("torch.")] = {
            "value": testing.error(error_form, matrices),
            "gradient": {name: testing.error(ours, truth) for name, ours, truth in pulled},
            "by_token": [testing.error(ours, truth) for ours, truth in sampled],
        }
        settings.progress(len(result) / 2)
    return result


def check(result: Result) -> None:
    """Values within the bars, gradients within ten times those."""
    for dtype, bar in VALUE_BARS.items():
        error = result[dtype]["value"]
        assert error < bar, f"error form and matrix form differ by {error:.1e} in {dtype}, wanted < {bar:.0e}"
        for name, error in result[dtype]["gradient"].items():
            bar = GRADIENT_BARS[dtype]
            assert error < bar, f"their gradients by {name} differ by {error:.1e} in {dtype}, wanted < {bar:.0e}"


def tables(result: Result) -> list[Table]:
    """Deviation of values and gradients, by dtype."""
    rows: list[tuple[str | int | float, ...]] = []
    for dtype, numbers in result.items():
        theirs = tuple(f"{error:.2e}" if dtype == "float32" else "--" for error in DOCUMENT.values())
        worst = max(numbers["gradient"].values())
        rows.append((dtype, *theirs, f"{numbers['value']:.2e}", f"{worst:.2e}"))
    columns = ("dtype", "PyTorch", "JAX", "ours, values", "ours, worst gradient")
    return [Table("Error form and matrix form, relative deviation", columns, rows)]


def _draw(result: Result, axes: Axes) -> None:
    for (dtype, numbers), color in zip(result.items(), ("C0", "C1"), strict=True):
        tokens = range(0, LENGTH, LENGTH // len(numbers["by_token"]))
        axes.semilogy(tokens, [max(error, 1e-17) for error in numbers["by_token"]], color=color, label=dtype)
    axes.set(xlabel="token", ylabel="relative deviation", title="Rounding does not build up")
    axes.legend()


def figures(result: Result) -> list[Figure]:
    """Show the deviation along the sequence."""
    caption = "Deviation between the two forms at every eighth token: flat, since each write erases old rounding."
    return [Figure("One rule, two readings", caption, partial(_draw, result))]


EXPERIMENT = Experiment(
    name="B3",
    title="One rule, two readings",
    claim="The error form S + beta k (v - S^T k)^T and the matrix form (I - beta k k^T) S + beta k v^T are one rule.",
    source="Dive into Deep Learning §12.5.2, The Delta Rule",
    setting=f"T = {LENGTH}, width {WIDTH}, unit keys, beta = sigmoid of a normal draw, seed 0; `ops.delta_rule` token "
    "by token against a loop over matrices; gradients under a fixed random cotangent.",
    band="Values below 1e-5 in float32 and 1e-12 in float64, gradients below ten times those.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=2.7,
)
