"""D3: what each part of Titans is worth on recall with overwrites, as the paper's own ablation takes them out."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from innerloop.experiments.blocks.layer_recall import LayerRecall
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table
from innerloop.nn import Titans
from innerloop.probe.trial import one_thread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KEYS, VALUES, PAIRS, WRITES = 6, 8, 3, 2
CHANCE = 1 / VALUES
WIDTH, BATCH, RATE = 24, 48, 5e-3
STEPS, QUICK_STEPS = 300, 100
EVERY = 10
JUDGED = (1, 2, 3)
"""Writes a key in the lists that are judged."""
OPTIONS: dict[str, Any] = {"variant": "mal", "window": 3, "mini_batch": 4, "rate": 4.0, "expansion": 2}
FULL = "Titans"
PARTS: dict[str, dict[str, Any]] = {
    FULL: {},
    "linear memory": {"depth": 1},
    "no convolution": {"taps": 0},
    "no momentum": {"momentum_max": 0.0},
    "no forgetting": {},
    "no persistent tokens": {"persistent": 0},
}
SEEDS = (1, 2)
LEAST = 4 * CHANCE


def draw(batch: int, writes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw lists that write each of three keys ``writes`` times, then ask for the last value of one."""
    keys = torch.stack([torch.randperm(KEYS, generator=generator)[:PAIRS] for _ in range(batch)])
    order = torch.stack([torch.randperm(PAIRS * writes, generator=generator) % PAIRS for _ in range(batch)])
    values = torch.randint(VALUES, order.shape, generator=generator)
    asked = torch.randint(PAIRS, (batch, 1), generator=generator)
    last = ((order == asked) * torch.arange(1, order.shape[1] + 1)).argmax(1, keepdim=True)
    listed = torch.stack((keys.gather(1, order), KEYS + values), -1).flatten(1)
    return torch.cat((listed, keys.gather(1, asked)), 1), values.gather(1, last)[:, 0]


def build(name: str) -> LayerRecall:
    """Return the layer with a part taken out, between an embedding and a feed-forward block."""
    layer = Titans(WIDTH, 1, **{**OPTIONS, **PARTS[name]})
    if name == "no forgetting":
        offset = layer.gates.alpha.offset
        assert offset is not None
        for parameter in layer.gates.alpha.parameters():
            parameter.requires_grad_(False)
        with torch.no_grad():
            offset.fill_(-torch.inf)
    return LayerRecall(KEYS + VALUES, VALUES, layer)


def train(name: str, seed: int, steps: int, settings: Settings, done: float, share: float) -> dict[str, Any]:
    """Train one, and return its losses and what it answers by writes a key."""
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(seed)
        block, generator = build(name), torch.Generator().manual_seed(seed)
        optimizer = torch.optim.Adam([p for p in block.parameters() if p.requires_grad], lr=RATE)
        losses = []
        for step in range(steps):
            sequence, answer = draw(BATCH, WRITES, generator)
            loss = F.cross_entropy(block(sequence), answer)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            settings.progress(done + share * (step + 1) / steps)
        return {"name": name, "seed": seed, "loss": losses[::EVERY], "accuracy": [judge(block, n) for n in JUDGED]}


@torch.no_grad()
def judge(block: LayerRecall, writes: int) -> float:
    """Return the share of 512 held-out lists that it answers."""
    sequence, answer = draw(512, writes, torch.Generator().manual_seed(999))
    return (block(sequence).argmax(-1) == answer).float().mean().item()


def run(settings: Settings) -> Result:
    """Train the layer and what is left of it without each part."""
    seeds, steps = (SEEDS[:1], QUICK_STEPS) if settings.quick else (SEEDS, STEPS)
    names = list(PARTS)[:3] if settings.quick else list(PARTS)
    jobs = [(name, seed) for name in names for seed in seeds]
    share = 1 / len(jobs)
    rows = [train(name, seed, steps, settings, done * share, share) for done, (name, seed) in enumerate(jobs)]
    return {"steps": steps, "rows": rows}


def check(result: Result) -> None:
    """The whole layer recalls what was written last; without the convolution no key meets its value."""
    whole = [row for row in result["rows"] if row["name"] == FULL]
    bare = [row for row in result["rows"] if row["name"] == "no convolution"]
    assert whole and bare, "0 rows of the whole layer, or of the one without convolution"
    for row in whole:
        first, last = row["loss"][0], sum(row["loss"][-3:]) / len(row["loss"][-3:])
        assert last < 0.95 * first, f"seed {row['seed']} goes from a loss of {first:.3f} to {last:.3f}"
        if result["steps"] == STEPS:
            got = row["accuracy"][1]
            assert got >= LEAST, f"the whole layer, seed {row['seed']}, answers {got:.3f}, wanted {LEAST}"
    if result["steps"] == STEPS:
        assert {row["name"] for row in result["rows"]} == set(PARTS), f"of {len(PARTS)} layers some are missing"
        ours, without = (sum(row["accuracy"][1] for row in rows) / len(rows) for rows in (whole, bare))
        assert ours > without, f"the convolution is worth nothing: {ours:.3f} with, {without:.3f} without"


def tables(result: Result) -> list[Table]:
    """What each answers, seed by seed."""
    columns = ("layer", "seed", "last loss", *(f"{n} write{'s' * (n > 1)} a key" for n in JUDGED))
    rows: list[tuple[str | int | float, ...]] = [
        (row["name"], row["seed"], f"{row['loss'][-1]:.3f}", *(f"{share:.3f}" for share in row["accuracy"]))
        for row in result["rows"]
    ]
    note = f"{result['steps']} batches of {BATCH} lists, {WRITES} writes a key; chance is {CHANCE:.3f}."
    return [Table("Titans without its parts", columns, rows, note)]


def _draw(result: Result, learning: Axes, recall: Axes) -> None:
    first = [row for row in result["rows"] if row["seed"] == SEEDS[0]]
    for number, row in enumerate(first):
        steps = [EVERY * i for i in range(len(row["loss"]))]
        learning.plot(steps, row["loss"], color=f"C{number}", label=row["name"])
        recall.plot(JUDGED, row["accuracy"], "o-", color=f"C{number}", label=row["name"])
    learning.set(xlabel="step", ylabel="cross entropy of the answer", title="Learning, seed 1")
    recall.axhline(CHANCE, color="#808080", linestyle="--")
    recall.set(xlabel="writes a key", ylabel="accuracy", title="Recall of the last value, seed 1", ylim=(0, 1.05))
    recall.set_xticks(JUDGED)
    learning.legend()


def figures(result: Result) -> list[Figure]:
    """Show how each learns, and what it recalls."""
    caption = f"First the loss, then recall by writes a key; training saw {WRITES}. The dashed line is chance."
    return [Figure("Titans without its parts", caption, partial(_draw, result), panels=2)]


EXPERIMENT = Experiment(
    name="D3",
    title="Titans without its parts",
    claim="On recall with overwrites a deep memory behind convolutions works; its parts can be taken out one by one.",
    source="Behrouz et al. (2024), arXiv:2501.00663: the ablation; Dive into Deep Learning §12.6",
    setting=f"{KEYS} keys, {VALUES} values, {PAIRS} keys written {WRITES} times each, then one asked for its last "
    f"value; innerloop.nn.Titans at width {WIDTH}, memory before a window of {OPTIONS['window']} tokens (mal), "
    f"mini-batches of {OPTIONS['mini_batch']}; {STEPS} steps of Adam at {RATE}, seeds 1 and 2. Quick: {QUICK_STEPS} "
    "steps, seed 1, three layers.",
    band=f"The whole layer recalls at least {LEAST}, four times chance, on every seed, and on average more than "
    "without convolutions; quick: its loss falls by a twentieth. The other parts are shown, with no band: on this task "
    "some are worth little.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=250,
    quick_seconds=25,
)
