"""B10: doubling beta lets a trained delta layer track parity beyond its training length."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from innerloop.data.tasks import Parity
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table
from innerloop.probe import Budget, Row, contender, summarised, trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BITS = 16
LAYERS = {"delta_rule(taps=0,allow_neg_eigval=true)": "to 2", "delta_rule(taps=0)": "to 1"}
SIDE = ("mamba2(taps=0)", "gla", "rwkv7", "attention")
"""Reported beside them in the full run."""
BUDGET = Budget(steps=600, batch=128, enough=2.0, judged=4096)
QUICK = Budget(steps=400, batch=128, enough=2.0, judged=2048)
SEEDS = (0, 1)
FACTORS, QUICK_FACTORS = (1, 2, 4, 8, 16), (1, 4)


def run(settings: Settings) -> Result:
    """Train every layer on words of 16 bits with a label at each."""
    budget, factors = (QUICK, QUICK_FACTORS) if settings.quick else (BUDGET, FACTORS)
    seeds, names = (SEEDS[:1], [*LAYERS]) if settings.quick else (SEEDS, [*LAYERS, *SIDE])
    wanted = [(name, seed) for name in names for seed in seeds]
    rows = []
    for number, (name, seed) in enumerate(wanted):

        def told(fraction: float, done: int = number) -> None:
            settings.progress((done + fraction) / len(wanted))

        chosen = contender(name, budget.width, budget.heads)
        made = partial(trial, chosen, Parity(bits=BITS), budget, seed, factors=factors, progress=told)
        rows.append(settings.part(f"{names.index(name)}-{seed}", lambda made=made: asdict(made())))
    return {"rows": rows, "steps": budget.steps}


def found(result: Result, layer: str) -> list[Row]:
    """Return the rows of a layer."""
    return [Row(**row) for row in result["rows"] if row["layer"] == layer]


def check(result: Result) -> None:
    """At the last position of four times the length: 2 sigma tells nine in ten, sigma is a coin."""
    doubled, single = (found(result, layer) for layer in LAYERS)
    for rows, name in ((doubled, "2 sigma"), (single, "sigma")):
        assert rows, f"no row of {name} among {len(result['rows'])}"
    for row in doubled:
        assert row.last["4"] >= 0.9, f"2 sigma tells {row.last['4']:.3f} at four times the length, seed {row.seed}"
    for row in single:
        assert 0.45 <= row.last["4"] <= 0.55, f"sigma tells {row.last['4']:.3f} at four times the length, wanted chance"


def tables(result: Result) -> list[Table]:
    """The last position's accuracy by length."""
    factors = list(result["rows"][0]["last"])
    rows: list[tuple[str | int | float, ...]] = []
    for layer in dict.fromkeys(row["layer"] for row in result["rows"]):
        summary = summarised(found(result, layer))
        spread = {f: f" ± {x:.3f}" if summary.seeds > 1 else "" for f, x in summary.last_spreads.items()}
        cells = (f"{summary.last[f]:.3f}{spread[f]}" for f in factors)
        rows.append((f"`{layer}`", LAYERS.get(layer, "–"), summary.seeds, *cells))
    columns = ("layer", "beta", "seeds", *(f"T = {BITS * int(f)}" for f in factors))
    note = (
        f"{result['steps']} updates of 128 words of {BITS} bits. What sigma reaches at the training's length is no "
        "evidence: magnitudes count there. Chance is 0.500."
    )
    return [Table("Parity at the last position", columns, rows, note)]


def _draw(result: Result, axes: Axes) -> None:
    layers = list(dict.fromkeys(row["layer"] for row in result["rows"]))
    for number, layer in enumerate(layers):
        summary = summarised(found(result, layer))
        lengths = [BITS * int(f) for f in summary.last]
        label = layer.partition("(")[0] + (", beta to 2" if "neg" in layer else "")
        means, spreads = list(summary.last.values()), list(summary.last_spreads.values())
        axes.errorbar(lengths, means, yerr=spreads, marker="o", color=f"C{number % 6}", label=label)
    axes.axvline(BITS, color="#808080", linestyle=":")
    axes.axhline(0.5, color="#808080", linestyle="--")
    axes.set(xlabel="T (dotted: as trained)", ylabel="parities told", xscale="log", title="Beyond that length")
    lengths = [BITS * int(f) for f in result["rows"][0]["last"]]
    axes.set_xticks(lengths, labels=[str(length) for length in lengths])
    axes.minorticks_off()
    axes.legend()


def figures(result: Result) -> list[Figure]:
    """Show accuracy by length."""
    return [Figure("Parity beyond the length", "The last position's accuracy over seeds.", partial(_draw, result))]


EXPERIMENT = Experiment(
    name="B10",
    title="Parity tracked by a trained delta layer",
    claim="`allow_neg_eigval` lets a trained delta layer track parity beyond its training length.",
    source="Dive into Deep Learning §12.5.5.1; Grazzi et al. (2025), arXiv:2411.12537",
    setting=f"`nn.DeltaNet` without convolution, 2 heads of 32, between an embedding and an MLP; {BITS} bits, a label "
    f"at each; {BUDGET.steps} updates of 128 words, Adam 3e-3; seeds 0 and 1; judged on 4,096 words up to 16 times as "
    f"long. Quick: seed 0, {QUICK.steps} updates, to four times.",
    band="At the last position of 4 times the length: beta to 2 at least .9, beta to 1 in .45 to .55.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=170,
    quick_seconds=30,
)
