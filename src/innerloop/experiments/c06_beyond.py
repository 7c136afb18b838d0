"""C6: what the documents' HOPE block leaves out: deep memories, frequencies, mini-batches, training through writes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from innerloop.experiments.blocks.hope_layer import answered, train_layer
from innerloop.experiments.blocks.recall import CHANCE, PAIRS, accuracy, train_each
from innerloop.experiments.c01_recall import STEPS as BLOCK_STEPS
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEEDS = (1, 2, 3)
LENGTHS = (4, 6, 8)
STEPS = 800
SIDE_STEPS = 400
EVERY = 5
FIRST, LONGER = 0.99, 0.98
LAYER = "Hope, linear memories"
BLOCK = "the document's block"
SIDE: dict[str, dict[str, Any]] = {
    "Hope, MLP memories": {"memory": "mlp", "periods": ()},
    "Hope, read before the write, mini-batches of 1": {"read": "before", "mini_batch": (1, 1), "periods": ()},
    "Hope, then levels of 2 and 8 tokens": {"periods": (2, 8)},
}


def run(settings: Settings) -> Result:
    """Train the layer on every seed, its variants on the first, and C1's blocks beside them."""
    jobs = [(LAYER, seed, STEPS, {"periods": ()}) for seed in (SEEDS[:1] if settings.quick else SEEDS)]
    if not settings.quick:
        jobs += [(name, SEEDS[0], SIDE_STEPS, options) for name, options in SIDE.items()]
    rows = []
    for done, (name, seed, steps, options) in enumerate(jobs):

        def share(part: float, done: int = done) -> None:
            settings.progress((done + part) / (len(jobs) + 1))

        block, losses = train_layer(seed, steps, options, share)
        rows.append({"name": name, "seed": seed, "steps": steps, "loss": losses[::EVERY],
                     "accuracy": [answered(block, pairs) for pairs in LENGTHS]})  # fmt: skip
    seeds = SEEDS[:1] if settings.quick else SEEDS
    for seed, trained in train_each(seeds, BLOCK_STEPS, progress=lambda _: None).items():
        rows.append({"name": BLOCK, "seed": int(seed), "steps": BLOCK_STEPS, "loss": trained.losses[::EVERY],
                     "accuracy": [accuracy(trained.block, pairs) for pairs in LENGTHS]})  # fmt: skip
    settings.progress(1.0)
    return {"rows": rows}


def check(result: Result) -> None:
    """The layer must recall on every seed and at every length; each variant must learn something."""
    assert any(row["name"] == LAYER for row in result["rows"]), "the layer itself was not trained"
    for row in result["rows"]:
        for pairs, share in zip(LENGTHS, row["accuracy"], strict=True):
            least = 2 * CHANCE if row["name"] != LAYER else FIRST if pairs == PAIRS else LONGER
            if row["name"] != BLOCK:
                assert share >= least, (
                    f"{row['name']}, seed {row['seed']}, answers {share:.3f} of lists of {pairs}, wanted {least:.3f}"
                )


def tables(result: Result) -> list[Table]:
    """Accuracy by length, row by row."""
    columns = ("layer", "seed", "steps", *(f"{pairs} pairs" for pairs in LENGTHS))
    rows: list[tuple[str | int | float, ...]] = [
        (row["name"], row["seed"], row["steps"], *(f"{share:.3f}" for share in row["accuracy"]))
        for row in result["rows"]
    ]
    return [Table("Recall with what the document leaves out", columns, rows, f"Chance is {CHANCE:.3f}.")]


def _draw(result: Result, axes: Axes) -> None:
    for number, row in enumerate(row for row in result["rows"] if row["seed"] == SEEDS[0]):
        axes.plot([EVERY * i for i in range(len(row["loss"]))], row["loss"], color=f"C{number}", label=row["name"])
    axes.set(xlabel="step", ylabel="cross entropy of the answer", title="Learning to recall, seed 1")
    axes.legend()


def figures(result: Result) -> list[Figure]:
    """Show the losses at the first seed."""
    caption = "Loss on batches of fresh lists of four pairs, the same lists for every layer."
    return [Figure("Loss by step", caption, partial(_draw, result))]


EXPERIMENT = Experiment(
    name="C6",
    title="Beyond the document's block",
    claim="With memories that modify themselves and are trained through their own writes, in mini-batches, recall is "
    "learned on every seed; deep memories and several frequencies train too.",
    source="NL-3 aside, Training a HOPE block: what it names as missing",
    setting=f"C1's task; the layer Hope at width 48, one head, largest rate 1, mini-batches of 16; {STEPS} steps of "
    f"Adam at 3e-3 on seeds 1, 2 and 3; variants {SIDE_STEPS} steps on seed 1; C1's blocks beside them.",
    band=f"The layer answers at least {FIRST} of lists of 4 pairs and {LONGER} of 6 and 8 on every seed; every variant "
    "at least twice chance at every length.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=200,
    quick_seconds=45,
)
