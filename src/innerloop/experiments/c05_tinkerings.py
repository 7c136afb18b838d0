"""C5: the document's tinkerings: more pairs than the memory holds, no convolution, raw targets, the gates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from innerloop.experiments.blocks.hope import HopeBlock
from innerloop.experiments.blocks.recall import BATCH, CHANCE, KEYS, PAIRS, VALUES, accuracy, draw, fit, spell, train
from innerloop.experiments.c01_recall import STEPS as BLOCK_STEPS
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEED = 1
KEY_WIDTH = 8
PAIRS_IN_ALL = (4, 8, 16, 32)
QUICK_PAIRS = (4, 16)
STEPS = 400
HELD, BROKEN = 0.95, 0.6
CHANGES: dict[str, dict[str, Any]] = {
    "no convolution": {"convolved": False},
    "the raw value as target": {"self_made": False},
}
COLLAPSED, KEPT = 0.6, 0.9


def run(settings: Settings) -> Result:
    """Train a block for every change, and read the gates of C1's."""
    pairs = QUICK_PAIRS if settings.quick else PAIRS_IN_ALL
    jobs = len(pairs) + len(CHANGES) + 1

    def told(part: float) -> None:
        settings.progress((len(filled) + len(changed) + part) / jobs)

    filled: dict[str, float] = {}
    changed: dict[str, float] = {}
    for count in pairs:

        def make(count: int = count) -> HopeBlock:
            return HopeBlock(count + VALUES, VALUES, key_width=KEY_WIDTH)

        block, _ = fit(make, SEED, STEPS, told, pairs=count, keys=count)
        filled[str(count)] = accuracy(block, count, count)
    for name, options in CHANGES.items():

        def make_changed(options: dict[str, Any] = options) -> HopeBlock:
            return HopeBlock(KEYS + VALUES, VALUES, **options)

        block, _ = fit(make_changed, SEED, STEPS, told)
        changed[name] = accuracy(block, PAIRS)
    return {"filled": filled, "changed": changed, "gates": _gates(told)}


def _gates(told: Callable[[float], None]) -> dict[str, Any]:
    """Return the rate and the keep of C1's block at every token of the list that C4 watches."""
    block, _ = train(SEED, BLOCK_STEPS, progress=told)
    sequence, _ = draw(1, PAIRS, torch.Generator().manual_seed(123))
    with torch.no_grad():
        rate, keep = block.gates(sequence)
    return {
        "tokens": [spell(token) for token in sequence[0].tolist()], "rate": rate[0].tolist(), "keep": keep[0].tolist()
    }  # fmt: skip


def check(result: Result) -> None:
    """Recall must break where there are more pairs than the memory has rows, and without the convolution."""
    filled = {int(count): share for count, share in result["filled"].items()}
    assert min(filled) < KEY_WIDTH < max(filled), f"lists of {sorted(filled)} pairs do not lie about {KEY_WIDTH}"
    for count, share in filled.items():
        if count <= KEY_WIDTH // 2:
            assert share >= HELD, f"of {count} pairs in {KEY_WIDTH} channels it answers {share:.3f}, wanted {HELD}"
        elif count >= 2 * KEY_WIDTH:
            assert share <= BROKEN, f"of {count} pairs in {KEY_WIDTH} channels it answers {share:.3f}, beyond its rank"
    without, raw = (result["changed"][name] for name in CHANGES)
    assert without <= COLLAPSED, f"without convolution it still answers {without:.3f}"
    assert raw >= KEPT, f"with the raw value as target it answers {raw:.3f}, wanted {KEPT}"
    rates = result["gates"]["rate"]
    assert max(rates) - min(rates) > 0.05, f"the rate hardly varies: from {min(rates):.3f} to {max(rates):.3f}"


def tables(result: Result) -> list[Table]:
    """Recall by fill, by change, and the gates by token."""
    fill: list[tuple[str | int | float, ...]] = [
        (int(count), f"{(int(count) - 1) / KEY_WIDTH:.2f}", f"{share:.3f}") for count, share in result["filled"].items()
    ]
    changes: list[tuple[str | int | float, ...]] = [(name, f"{share:.3f}") for name, share in result["changed"].items()]
    gates = result["gates"]
    values: list[tuple[str | int | float, ...]] = [
        (name, *(f"{x:.2f}" for x in gates[key])) for name, key in (("rate, eta", "rate"), ("kept, alpha", "keep"))
    ]
    note = f"Keys of {KEY_WIDTH} channels, every key of the vocabulary in the list; chance is {CHANCE:.3f}."
    return [
        Table("Raising the pairs", ("pairs, n", "(n - 1) / d_k", "recall"), fill, note),
        Table("Other changes, four pairs", ("change", "recall"), changes),
        Table("The gates of C1's block, token by token", ("gate", *_numbered(gates["tokens"])), values),
    ]


def _numbered(tokens: list[str]) -> list[str]:
    return [f"{place}: {token}" for place, token in enumerate(tokens, start=1)]


def _draw(result: Result, fill: Axes, gates: Axes) -> None:
    counts = [int(count) for count in result["filled"]]
    fill.plot(counts, list(result["filled"].values()), "o-", color="C0", label=f"keys of {KEY_WIDTH} channels")
    fill.axvline(KEY_WIDTH, color="C1", linestyle="--", label="as many pairs as channels")
    fill.axhline(CHANCE, color="C3", linestyle=":", label="chance")
    fill.set(xlabel="pairs", ylabel="recall", title="A matrix holds as many pairs as it has rows", ylim=(0, 1.05))
    fill.legend()
    tokens = range(1, 1 + len(result["gates"]["tokens"]))
    gates.plot(tokens, result["gates"]["rate"], "o-", color="C0", label="rate")
    gates.plot(tokens, result["gates"]["keep"], "s-", color="C2", label="kept")
    gates.set_xticks(list(tokens), result["gates"]["tokens"])
    gates.set(xlabel="token", ylabel="gate", title="The update rule varies by token", ylim=(0, 1.05))
    gates.legend()


def figures(result: Result) -> list[Figure]:
    """Show where recall breaks, and the gates."""
    caption = "First recall against the number of pairs, then the gates that C1's block gives the tokens of one list."
    return [Figure("Tinkerings", caption, partial(_draw, result), panels=2)]


EXPERIMENT = Experiment(
    name="C5",
    title="Tinkering with the block",
    claim="Recall breaks where there are more pairs than the matrix has rows, and without the convolution; the target "
    "may be the raw value; rates vary by token.",
    source="NL-3 aside, Training a HOPE block: things to tinker with",
    setting=f"C1's block, {STEPS} steps on batches of {BATCH}, seed {SEED}. Capacity: keys of {KEY_WIDTH} channels and "
    f"as many keys as pairs, {', '.join(map(str, PAIRS_IN_ALL))} (quick: {', '.join(map(str, QUICK_PAIRS))}); the "
    "other changes on four pairs of eight keys.",
    band=f"Recall of at least {HELD} at half as many pairs as channels and at most {BROKEN} from twice as many on (the "
    f"law's (n - 1) / d_k = 1 lies between); at most {COLLAPSED} without convolution, at least {KEPT} with raw "
    "targets; rates that differ by .05.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=70,
    quick_seconds=45,
)
