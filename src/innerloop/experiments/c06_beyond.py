"""C6: what the documents' HOPE block leaves out: deep memories, frequencies, mini-batches, training through writes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from innerloop.experiments.blocks.hope_layer import STEPS, Trained, answered, layers, train_layer
from innerloop.experiments.blocks.recall import CHANCE, PAIRS, accuracy, train_each
from innerloop.experiments.c01_recall import STEPS as BLOCK_STEPS
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEEDS = (1, 2, 3)
LENGTHS = (4, 6, 8)
SIDE_STEPS = 250
MANY_KEYS, MANY_PAIRS, MANY_STEPS = 64, 8, 800
EVERY = 5
FIRST, LONGER = 0.99, 0.98
LAYER = "Hope, linear memories"
BLOCK = "the document's block"
MANY = f"Hope, linear memories, {MANY_PAIRS} of {MANY_KEYS} keys"
SIDE: dict[str, dict[str, Any]] = {
    "Hope, mini-batches of 4": {"mini_batch": 4, "periods": ()},
    "Hope, MLP memories": {"memory": "mlp", "periods": ()},
    "Hope, read before the write, mini-batches of 1": {"read": "before", "mini_batch": (1, 1), "periods": ()},
    "Hope, then levels of 4 and 8 tokens": {"periods": (4, 8)},
}


def run(settings: Settings) -> Result:
    """Train the layer, its variants and C1's blocks on every seed, and the layer on more keys."""
    seeds = SEEDS[:1] if settings.quick else SEEDS
    total = 1 if settings.quick else 2 + len(SIDE)
    rows = []

    def told(stage: int) -> Callable[[float], None]:
        return lambda part: settings.progress((stage + part) / total)

    for seed, found in layers(seeds, progress=told(0)).items():
        rows.append(_row(LAYER, int(seed), found, LENGTHS))
    if not settings.quick:
        for stage, (name, options) in enumerate(SIDE.items()):
            for done, seed in enumerate(SEEDS):
                share = partial(_share, told(1 + stage), done)
                rows.append(_row(name, seed, train_layer(seed, SIDE_STEPS, options, share), LENGTHS))
        options = {"periods": (), "keys": MANY_KEYS}
        found = train_layer(SEEDS[0], MANY_STEPS, options, told(total - 1), pairs=MANY_PAIRS)
        rows.append(_row(MANY, SEEDS[0], found, (MANY_PAIRS,)))
    for seed, trained in train_each(seeds, BLOCK_STEPS, progress=lambda _: None).items():
        rows.append({"name": BLOCK, "seed": int(seed), "steps": BLOCK_STEPS, "loss": trained.losses[::EVERY],
                     "pairs": LENGTHS, "accuracy": [accuracy(trained.block, pairs) for pairs in LENGTHS]})  # fmt: skip
    settings.progress(1.0)
    return {"rows": rows}


def _share(told: Callable[[float], None], done: int, part: float) -> None:
    told((done + part) / len(SEEDS))


def _row(name: str, seed: int, found: Trained, lengths: tuple[int, ...]) -> dict[str, Any]:
    block, losses = found
    return {
        "name": name, "seed": seed, "steps": len(losses), "loss": losses[::EVERY], "pairs": lengths,
        "accuracy": [answered(block, pairs) for pairs in lengths],
    }  # fmt: skip


def check(result: Result) -> None:
    """The layer must recall on every seed and at every length; each variant must learn something."""
    assert any(row["name"] == LAYER for row in result["rows"]), "the layer itself was not trained"
    for row in result["rows"]:
        for pairs, share in zip(row["pairs"], row["accuracy"], strict=True):
            least = 2 * CHANCE if row["name"] != LAYER else FIRST if pairs == PAIRS else LONGER
            if row["name"] != BLOCK:
                assert share >= least, (
                    f"{row['name']}, seed {row['seed']}, answers {share:.3f} of lists of {pairs}, wanted {least:.3f}"
                )


def tables(result: Result) -> list[Table]:
    """Accuracy by length, row by row."""
    columns = ("layer", "seed", "steps", *(f"{pairs} pairs" for pairs in LENGTHS))
    shares = [dict(zip(row["pairs"], row["accuracy"], strict=True)) for row in result["rows"]]
    rows: list[tuple[str | int | float, ...]] = [
        (row["name"], row["seed"], row["steps"], *(f"{share[n]:.3f}" if n in share else "–" for n in LENGTHS))
        for row, share in zip(result["rows"], shares, strict=True)
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
    setting=f"C1's task; the layer Hope at width 48, one head, largest rate 1, mini-batches of 16 (lists of four pairs "
    f"end before one does, in those of 4 and 1 the memories that speak change while they are trained); {STEPS} steps "
    f"of Adam at 3e-3, falling to 0 over the second half, on seeds 1, 2 and 3; variants {SIDE_STEPS} steps on each; "
    f"C1's blocks beside them; lists of {MANY_PAIRS} pairs of {MANY_KEYS} keys, {MANY_STEPS} steps on seed 1. Quick: "
    "the layer on seed 1, as C1 trains it.",
    band=f"The layer answers at least {FIRST} of lists of 4 pairs and {LONGER} of 6 and 8 on every seed; every variant "
    "at least twice chance at every length.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=480,
    quick_seconds=2,
)
