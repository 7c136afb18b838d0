"""B4: the chunked WY form is the recurrence, reorganised, at every chunk size."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from innerloop import ops, testing
from innerloop.experiments.b03_two_forms import LENGTH, VALUE_BARS, WIDTH, draw_inputs, gradients
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHUNKS = (1, 7, 16, 64, 100, 256, 512)
DOCUMENT = {16: ("3.00e-07", "3.46e-07"), 64: ("4.03e-07", "4.32e-07"), 256: ("3.63e-07", "4.76e-07")}


def token_loop(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Run the definition in numpy float64: read, subtract, write, read."""
    queries, keys, values = (x[0, :, 0].detach().double().numpy() for x in (q, k, v))
    state, rows = np.zeros((WIDTH, WIDTH)), []
    for t, strength in enumerate(beta[0, :, 0].tolist()):
        state = state + strength * np.outer(keys[t], values[t] - keys[t] @ state)
        rows.append(queries[t] @ state)
    return torch.from_numpy(np.stack(rows))[None, :, None]


def run(settings: Settings) -> Result:
    """Compare the chunk form with the recurrent form of the op and with a token loop, values and gradients."""
    result: Result = {}
    for dtype in (torch.float32, torch.float64):
        inputs = draw_inputs(dtype)
        q, k, v, beta = inputs
        truth = token_loop(*inputs)
        recurrent, _ = ops.delta_rule(q, k, v, beta=beta, scale=1.0, form="recurrent")
        pulled = gradients(recurrent, inputs)
        rows = {}
        for chunk in CHUNKS:
            o, _ = ops.delta_rule(q, k, v, beta=beta, scale=1.0, form="chunk", chunk_size=chunk)
            rows[str(chunk)] = {
                "value": testing.error(o, recurrent),
                "truth": testing.error(o.double(), truth),
                "gradient": max(testing.error(a, b) for a, b in zip(gradients(o, inputs), pulled, strict=True)),
            }
            settings.progress((len(result) + len(rows) / len(CHUNKS)) / 2)
        result[str(dtype).removeprefix("torch.")] = rows
    return result


def check(result: Result) -> None:
    """Every chunk size within the bars, values and gradients alike."""
    for dtype, bar in VALUE_BARS.items():
        for chunk, numbers in result[dtype].items():
            for what, error in numbers.items():
                assert error < bar, f"chunks of {chunk}: {what} off by {error:.1e} in {dtype}, wanted < {bar:.0e}"


def tables(result: Result) -> list[Table]:
    """Deviation by chunk size."""
    columns = (
        "chunk size", "PyTorch", "JAX", "ours, float32", "its gradients", "float32 and the float64 loop",
        "ours, float64", "its gradients",
    )  # fmt: skip
    rows: list[tuple[str | int | float, ...]] = []
    for chunk in CHUNKS:
        single, double = (result[dtype][str(chunk)] for dtype in ("float32", "float64"))
        ours = (single["value"], single["gradient"], single["truth"], double["value"], double["gradient"])
        rows.append((chunk, *DOCUMENT.get(chunk, ("--", "--")), *(f"{error:.2e}" for error in ours)))
    note = "Relative to the recurrent form in the same dtype, where nothing else is said; the worst gradient."
    return [Table("Chunked form and recurrence, relative deviation", columns, rows, note)]


def _draw(result: Result, axes: Axes) -> None:
    for dtype, color in (("float32", "C0"), ("float64", "C1")):
        for what, line in (("value", "o-"), ("gradient", "s--")):
            errors = [max(result[dtype][str(chunk)][what], 1e-17) for chunk in CHUNKS]
            axes.loglog(CHUNKS, errors, line, color=color, markersize=4, label=f"{dtype}, {what}s")
        axes.axhline(VALUE_BARS[dtype], color=color, linestyle=":", label=f"{dtype}, bar")
    axes.set(xlabel="chunk size", ylabel="relative deviation", title="Every chunk size gives the recurrence")
    axes.legend(fontsize="small")


def figures(result: Result) -> list[Figure]:
    """Show the deviation over chunk sizes."""
    caption = "The chunk form against the recurrent form of the same op, with the bars that it must stay below."
    return [Figure("Chunked equals recurrent", caption, partial(_draw, result))]


EXPERIMENT = Experiment(
    name="B4",
    title="The WY trick changes nothing",
    claim="The chunked WY form equals the recurrence at every chunk size.",
    source="Dive into Deep Learning §12.5.3, Training It: the WY Trick",
    setting=f"The inputs of B3 (T = {LENGTH}, width {WIDTH}); `ops.delta_rule` in chunks of "
    f"{', '.join(map(str, CHUNKS))} against its recurrent form and a float64 token loop; gradients "
    "under a fixed random cotangent.",
    band="Values and gradients below 1e-5 in float32 and 1e-12 in float64.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=1.6,
)
