"""D2: how much a layer recalls by the bytes that it carries, attention as the ceiling."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from innerloop.data.tasks import MultiQueryRecall
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table
from innerloop.probe import Budget, Row, contender, summarised, trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAIRS, VOCABULARY, TOKENS = 8, 32, 32
TASK = MultiQueryRecall(pairs=PAIRS, vocabulary=VOCABULARY, tokens=TOKENS, blank=True)
HEADS = 2
RULES = ("mamba2", "delta_rule", "gated_delta_rule", "kda", "delta_product", "mesa")
QUICK_RULES = ("mamba2", "delta_rule")
CEILING = "attention"
WIDTHS, QUICK_WIDTHS = (2, 4, 8, 16), (2, 16)
"""Of a head's keys and values: memories of 2 K V numbers."""
BUDGET = Budget(steps=400, batch=64, heads=HEADS, judged=512)
QUICK = Budget(steps=200, batch=64, heads=HEADS, judged=256)
SEEDS, QUICK_SEEDS = (0, 1), (0,)


def named(rule: str, width: int) -> str:
    """Return a layer's pattern with heads of this width."""
    return f"{rule}(key_width={width},value_width={width})"


def run(settings: Settings) -> Result:
    """Train every rule at every size, and attention."""
    budget = QUICK if settings.quick else BUDGET
    rules, widths, seeds = (
        (QUICK_RULES, QUICK_WIDTHS, QUICK_SEEDS) if settings.quick else (RULES, WIDTHS, SEEDS)
    )
    wanted = [(rule, width, seed) for rule in rules for width in widths for seed in seeds]
    wanted += [(CEILING, 0, seed) for seed in seeds]
    rows = []
    for number, (rule, width, seed) in enumerate(wanted):

        def told(fraction: float, done: int = number) -> None:
            settings.progress((done + fraction) / len(wanted))

        # Without a convolution a key and its value meet only in a second layer.
        depth = 2 if rule == CEILING else 1
        chosen = contender(named(rule, width) if width else rule, budget.width, HEADS, depth)
        made = partial(trial, chosen, TASK, budget, seed, progress=told)
        row = settings.part(f"{rule}-{width}-{seed}", lambda made=made: asdict(made()))
        rows.append(row | {"rule": rule, "memory": 4 * HEADS * width * width})
    return {"rows": rows, "steps": budget.steps, "rules": list(rules), "widths": list(widths)}


def scores(result: Result, rule: str, memory: int) -> list[Row]:
    """Return the rows of a rule at a size of memory."""
    found = [row for row in result["rows"] if (row["rule"], row["memory"]) == (rule, memory)]
    return [Row(**{name: x for name, x in row.items() if name not in ("rule", "memory")}) for row in found]


def _mean(result: Result, rule: str, width: int) -> float:
    rows = scores(result, rule, 4 * HEADS * width * width)
    assert rows, f"no row of {rule} at {width} channels among {len(result['rows'])}"
    return summarised(rows).scores["1"]


def check(result: Result) -> None:
    """A larger memory recalls more, editing or adding; and the least one is below attention."""
    low, high = result["widths"][0], result["widths"][-1]
    ceiling = _mean(result, CEILING, 0)
    for rule in result["rules"]:
        small, large = _mean(result, rule, low), _mean(result, rule, high)
        assert large <= 1 and small >= 0, f"{rule} scores {small} and {large}"
        assert small < 0.8, f"{rule} recalls {small:.3f} of {PAIRS} pairs in heads of {low}, wanted too little room"
    delta, small = _mean(result, "delta_rule", high), _mean(result, "delta_rule", low)
    assert delta > small + 0.2, f"the delta rule recalls {small:.3f} in heads of {low} and {delta:.3f} of {high}"
    assert delta >= 0.9, f"the delta rule recalls {delta:.3f} in heads of {high}, wanted .9"
    if result["steps"] == BUDGET.steps:
        assert ceiling >= 0.95, f"attention recalls {ceiling:.3f}, wanted .95"


def tables(result: Result) -> list[Table]:
    """Recall by bytes."""
    sizes = [4 * HEADS * width * width for width in result["widths"]]
    rows: list[tuple[str | int | float, ...]] = [
        (f"`{rule}`", *(_shown(scores(result, rule, size)) for size in sizes)) for rule in result["rules"]
    ]
    ceiling = scores(result, CEILING, 0)
    rows.append((f"`{CEILING}`, two layers, {ceiling[0].state_bytes or 0:,} bytes", *["–"] * (len(sizes) - 1),
                 _shown(ceiling)))  # fmt: skip
    note = (
        f"{PAIRS} pairs of a vocabulary of {VOCABULARY} in {TOKENS} tokens, at most {result['steps']} updates of 64. "
        f"Chance {TASK.chance:.3f}; a value of the list at random {TASK.shortcut:.3f}. Bytes are the memory's in "
        "float32; convolutions keep the last three tokens beside it."
    )
    return [Table("Share of questions answered", ("layer", *(f"{size:,} bytes" for size in sizes)), rows, note)]


def _shown(rows: list[Row]) -> str:
    found = summarised(rows)
    return f"{found.scores['1']:.3f}" + (f" ± {found.spreads['1']:.3f}" if found.seeds > 1 else "")


def _draw(result: Result, axes: Axes) -> None:
    for number, rule in enumerate(result["rules"]):
        sizes = [4 * HEADS * width * width for width in result["widths"]]
        found = [summarised(scores(result, rule, size)) for size in sizes]
        axes.errorbar(sizes, [x.scores["1"] for x in found], yerr=[x.spreads["1"] for x in found], marker="o",
                      color=f"C{number % 6}", label=rule)  # fmt: skip
    axes.axhline(_mean(result, CEILING, 0), color="#808080", linestyle="--", label="attention")
    axes.axhline(TASK.shortcut, color="#808080", linestyle=":", label="any value of the list")
    axes.set(xlabel="bytes of memory", ylabel="questions answered", xscale="log", ylim=(0, 1.05), title="Many queries")
    axes.legend()


def figures(result: Result) -> list[Figure]:
    """Show recall by bytes."""
    caption = "Layers at equal bytes; attention keeps every pair."
    return [Figure("Recall against state", caption, partial(_draw, result))]


EXPERIMENT = Experiment(
    name="D2",
    title="Recall against the bytes carried",
    claim="At equal bytes the rules differ in what they recall; what a state holds grows with it, and attention is the "
    "ceiling.",
    source="Arora et al. (2023), arXiv:2312.04927; Arora et al. (2024), arXiv:2402.18668",
    setting=f"Multi-query recall of {PAIRS} pairs; layers of width 64 with 2 heads of 2, 4, 8 and 16 channels and "
    f"convolutions of 4, attention with two layers; at most {BUDGET.steps} updates of 64, Adam 3e-3, seeds 0 and 1. "
    f"Quick: two rules, two sizes, {QUICK.steps} updates, seed 0.",
    band="Every rule below .8 in heads of 2; the delta rule at least .9 in heads of 16 and .2 above its least; in the "
    "full run attention at least .95.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=420,
    quick_seconds=45,
)
