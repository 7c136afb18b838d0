"""C2: without its memory the HOPE block knows the last pair, and nothing before it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from innerloop.experiments.blocks.hope_layer import HopeLayerBlock, layers
from innerloop.experiments.blocks.recall import CHANCE, PAIRS, HopeBlock, accuracy, held_out, train_each
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table
from innerloop.probe.trial import one_thread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEEDS = (1, 2, 3)
STEPS = 500
ACCURACY = 0.320
BAND = (0.2, 0.45)


def run(settings: Settings) -> Result:
    """Train without memory on each seed, and ask for pairs at every place of the list."""
    trained = train_each(SEEDS, STEPS, memory=False, progress=lambda part: settings.progress(part / 2))
    ours = layers(SEEDS, STEPS, memory=False, progress=lambda part: settings.progress((1 + part) / 2))
    return {"seeds": _judged(trained), "layer": _judged(ours)}


def _judged(trained: Mapping[str, tuple[HopeBlock | HopeLayerBlock, list[float]]]) -> dict[str, dict[str, Any]]:
    return {
        seed: {"accuracy": accuracy(block, PAIRS), "places": by_place(block)} for seed, (block, _) in trained.items()
    }


@torch.no_grad()
def by_place(block: HopeBlock | HopeLayerBlock) -> list[float]:
    """Share of held-out lists answered rightly, by which of their pairs was asked for."""
    sequence, answer = held_out(PAIRS)
    with one_thread():
        right = block(sequence).argmax(-1) == answer
    place = (sequence[:, :-1:2] == sequence[:, -1:]).int().argmax(-1)
    return [right[place == number].float().mean().item() for number in range(PAIRS)]


def check(result: Result) -> None:
    """Recall must collapse, and what is left must come from the last pair."""
    assert len(result["layer"]) == len(SEEDS), f"{len(result['layer'])} layers trained, wanted {len(SEEDS)}"
    low, high = BAND
    for name, key in (("", "seeds"), (" of the layer", "layer")):
        for seed, row in result[key].items():
            got, (*earlier, last) = row["accuracy"], row["places"]
            assert low <= got <= high, f"seed {seed}{name} answers {got:.3f}, wanted {low} to {high}"
            assert last > 2 * max(earlier), f"seed {seed}{name}: last pair {last:.3f}, best before {max(earlier):.3f}"


def tables(result: Result) -> list[Table]:
    """Accuracy in all and by place, seed by seed."""
    places = (f"pair {number + 1} of {PAIRS}" for number in range(PAIRS))
    columns = ("block", "seed", "accuracy, document", "ours", *places)
    rows: list[tuple[str | int | float, ...]] = [
        (
            block,
            seed,
            f"{ACCURACY:.3f}" if (block, seed) == ("the document's", "1") else "not given",
            f"{row['accuracy']:.3f}",
            *(f"{share:.3f}" for share in row["places"]),
        )
        for block, key in (("the document's", "seeds"), ("Hope, never written", "layer"))
        for seed, row in result[key].items()
    ]
    note = f"Chance is {CHANCE:.3f}. The convolution shows the last key three tokens: a pair, and the value before it."
    return [Table("Recall without memory", columns, rows, note)]


def _draw(result: Result, axes: Axes) -> None:
    places = range(1, PAIRS + 1)
    for (seed, row), color in zip(result["seeds"].items(), ("C0", "C2", "C4"), strict=True):
        axes.plot(places, row["places"], "o-", color=color, label=f"seed {seed}")
    axes.axhline(CHANCE, color="C1", linestyle="--", label="chance")
    axes.set(xlabel="pair asked for", ylabel="accuracy", title="Only the last pair is known", ylim=(0, 1.05))
    axes.set_xticks(list(places))
    axes.legend()


def figures(result: Result) -> list[Figure]:
    """Show accuracy by the place of the pair that is asked for."""
    caption = f"Accuracy on 512 held-out lists by the place of the pair asked for, after {STEPS} steps without memory."
    return [Figure("A recency shortcut", caption, partial(_draw, result))]


EXPERIMENT = Experiment(
    name="C2",
    title="The same block without its memory",
    claim="With the memory off, recall collapses to a recency shortcut.",
    source="NL-3 aside, Training a HOPE block: §4",
    setting=f"C1's block and data, the query going straight to the feed-forward block; {STEPS} steps, seeds 1 to 3. "
    "The same of the library's layer, whose memory is then the identity.",
    band=f"Accuracy from {BAND[0]} to {BAND[1]} on every seed (.320 printed, at seed 1), and the last pair answered "
    "more than twice as well as any other; the same of the layer.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=20,
)
