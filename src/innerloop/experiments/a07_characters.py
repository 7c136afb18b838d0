"""A7: a smoother is faithful and ragged, one pass of a delta rule smooth and shallow, a solve threads the noise."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from innerloop.experiments.a06_spectrum import bumps, descend, draw_data, smooth, solve, truth
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHARACTERS = {
    "kernel smoother": "faithful, ragged",
    "one-pass delta": "smooth, shallow",
    "batch solve": "threads the noise",
}


def run(settings: Settings) -> Result:
    """Fit the data of A6 three ways and measure each curve."""
    data = draw_data()
    features, stored = bumps(data.grid), bumps(data.x)
    delta, ridge = descend(data, passes=1), solve(data)
    curves = (smooth(data, data.grid), features @ delta, features @ ridge)
    settings.progress(0.5)
    answers = (smooth(data, data.x), stored @ delta, stored @ ridge)

    def measure(curve: Tensor, answer: Tensor) -> dict[str, float]:
        return {
            "variation": curve.diff(dim=0).abs().sum().item(),
            "span": (curve.max() - curve.min()).item(),
            "training": (answer - data.y).square().mean().item(),
            "test": (curve - truth(data.grid)).square().mean().item(),
        }

    settings.progress(1.0)
    columns = {"x": data.x, "y": data.y, "grid": data.grid, "truth": truth(data.grid)}
    return {
        **{name: column[:, 0].tolist() for name, column in columns.items()},
        "curves": {name: curve[:, 0].tolist() for name, curve in zip(CHARACTERS, curves, strict=True)},
        "measures": {name: measure(*two) for name, *two in zip(CHARACTERS, curves, answers, strict=True)},
    }


def check(result: Result) -> None:
    """Roughness and fidelity must order the three as the document describes them."""
    smoother, delta, batch = (result["measures"][name] for name in CHARACTERS)
    variation = [one["variation"] for one in (smoother, batch, delta)]
    assert variation[0] > variation[1] > variation[2], f"variation of smoother, batch, one pass: {variation}"
    training = [one["training"] for one in (smoother, batch, delta)]
    assert training[0] < training[1] < training[2], f"training error of smoother, batch, one pass: {training}"
    assert delta["span"] < 0.8 * batch["span"], f"one pass spans {delta['span']:.2f}, the batch {batch['span']:.2f}"
    test = [one["test"] for one in (batch, smoother, delta)]
    assert test[0] < min(test[1:]), f"the batch solve should be nearest the truth: {test}"


def tables(result: Result) -> list[Table]:
    """The measures of the three curves."""
    rows: list[tuple[str | int | float, ...]] = [
        (name, said, *(f"{result['measures'][name][key]:.3f}" for key in ("variation", "span", "training", "test")))
        for name, said in CHARACTERS.items()
    ]
    columns = ("fit", "document", "total variation", "span", "error on its own points", "error on the truth")
    return [Table("Three characters, in numbers", columns, rows, "The document shows a figure and prints no number.")]


def _draw(result: Result, *panels: Axes) -> None:
    for axes, name, color in zip(panels, CHARACTERS, ("C0", "C1", "C2"), strict=True):
        axes.plot(result["x"], result["y"], "o", color="C3", markersize=3, alpha=0.6, label="data")
        axes.plot(result["grid"], result["truth"], color="C4", linestyle=":", label="truth")
        axes.plot(result["grid"], result["curves"][name], color=color, label=name)
        axes.set(xlabel="x", ylabel="y", title=f"{name}: {CHARACTERS[name]}", ylim=(-2, 3.6))
        axes.legend(loc="upper center")


def figures(result: Result) -> list[Figure]:
    """Show the three fits."""
    caption = "The same 64 noisy points, stored by a kernel smoother, one pass of the delta rule, and a ridge solve."
    return [Figure("Three characters", caption, partial(_draw, result), panels=3)]


EXPERIMENT = Experiment(
    name="A7",
    title="Three characters",
    claim="A kernel smoother is faithful and ragged, a one-pass delta rule smooth and shallow, a batch solve threads "
    "the noise.",
    source="Dive into Deep Learning §12.6, Learning at Test Time: three characters",
    setting="The data, feature space and settings of A6.",
    band="Total variation: smoother > batch > one pass; error on its own points the other way round.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=0.5,
)
