"""D4: recipes that nobody has named, each a trainable layer by one line."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from innerloop.experiments.blocks.layer_recall import LayerRecall
from innerloop.experiments.blocks.recall import BATCH, CHANCE, KEYS, PAIRS, VALUES, accuracy, fit
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table
from innerloop.nn import RecipeLayer
from innerloop.recipe import MLP, Exact, GradientStep, ImplicitStep, LinearMap, Recipe, Uniform, Window

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, KEY = 24, 16
QUICK_STEPS = 150
EVERY = 5
SEED = 1


def huber(prediction: Tensor, target: Tensor) -> Tensor:
    """Return a loss that is square near 0 and straight beyond 1, so that no pair pulls harder than that."""
    error = (prediction - target).abs()
    return torch.where(error < 1, 0.5 * error.square(), error - 0.5).sum(-1)


RECIPES: dict[str, Recipe] = {
    "Huber loss with momentum on an MLP": Recipe(
        Uniform(), MLP((KEY, 32, KEY)), GradientStep(rate=0.1, momentum=0.5, loss=huber)
    ),
    "two implicit steps a token": Recipe(Uniform(), LinearMap(), ImplicitStep(strength=None, steps=2)),
    "a window of six tokens, solved": Recipe(Window(6), LinearMap(), Exact(ridge=0.1)),
}
STEPS = dict(zip(RECIPES, (500, 300, 400), strict=True))
LEAST = 0.9
QUICK_LEAST = 2 * CHANCE


def run(settings: Settings) -> Result:
    """Train a layer of each recipe on C1's task."""
    rows = []
    for done, (name, recipe) in enumerate(RECIPES.items()):

        def make(recipe: Recipe = recipe) -> LayerRecall:
            return LayerRecall(KEYS + VALUES, VALUES, RecipeLayer(WIDTH, recipe, key_width=KEY))

        def told(part: float, done: int = done) -> None:
            settings.progress((done + part) / len(RECIPES))

        steps = QUICK_STEPS if settings.quick else STEPS[name]
        block, losses = fit(make, SEED, steps, told)
        rows.append({"name": name, "steps": steps, "loss": losses[::EVERY], "accuracy": accuracy(block, PAIRS)})
    return {"rows": rows}


def check(result: Result) -> None:
    """Every recipe is there and answers."""
    assert [row["name"] for row in result["rows"]] == list(RECIPES), f"of {len(RECIPES)} recipes some are missing"
    for row in result["rows"]:
        least = QUICK_LEAST if row["steps"] == QUICK_STEPS else LEAST
        assert row["accuracy"] >= least, f"{row['name']} answers {row['accuracy']:.3f}, wanted {least:.3f}"


def tables(result: Result) -> list[Table]:
    """What each answers, and the line that it is."""
    rows: list[tuple[str | int | float, ...]] = [
        (row["name"], " · ".join(RECIPES[row["name"]].describe()), row["steps"], f"{row['accuracy']:.3f}")
        for row in result["rows"]
    ]
    note = f"Batches of {BATCH} lists of {PAIRS} pairs; chance is {CHANCE:.3f}."
    return [Table("Recipes without a name", ("recipe", "weights · class · solver", "steps", "recall"), rows, note)]


def _draw(result: Result, axes: Axes) -> None:
    for number, row in enumerate(result["rows"]):
        axes.plot([EVERY * i for i in range(len(row["loss"]))], row["loss"], color=f"C{number}", label=row["name"])
    axes.set(xlabel="step", ylabel="cross entropy of the answer", title="New ideas learn")
    axes.legend()


def figures(result: Result) -> list[Figure]:
    """Show the losses."""
    caption = "Loss on batches of fresh lists, the same for every recipe."
    return [Figure("Loss by step", caption, partial(_draw, result))]


EXPERIMENT = Experiment(
    name="D4",
    title="Recipes without a name",
    claim="Any choice of weights, memory and solver is a layer that trains, also one that nobody has published.",
    source="Ours: DESIGN's three choices; Dive into Deep Learning §12.6, One recipe",
    setting=f"C1's task through innerloop.nn.RecipeLayer at width {WIDTH}, keys and values of {KEY}, seed {SEED}; "
    f"{', '.join(map(str, STEPS.values()))} steps of Adam at 3e-3 in the table's order (quick: {QUICK_STEPS} each).",
    band=f"Recall of at least {LEAST} each; quick: twice chance.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=190,
    quick_seconds=65,
)
