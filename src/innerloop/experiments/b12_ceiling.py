"""B12: the ladder of what a transition can track, and its ceiling: S5 by a plain nonlinear RNN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from innerloop import ops
from innerloop.data.tasks import Parity, Task, WordProblem
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table
from innerloop.probe import Budget, Contender, Row, contender, trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LETTERS = 12
TASKS: dict[str, Task] = {
    "parity": Parity(bits=LETTERS),
    "S3": WordProblem(group="S3", letters=LETTERS),
    "S5": WordProblem(group="S5", letters=LETTERS),
}
FACTORS = (1, 2, 4)
STEPS = {"parity": 400, "S3": 600, "S5": 600}
RNN_BUDGET = Budget(steps=3000, batch=128, rate=1e-3, enough=0.9998, width=256, feed_forward=0, judged=1024)


@dataclass(frozen=True)
class Rung:
    """One row of the document's table."""

    transition: str
    printed: str
    """Eigenvalues and what they unlock, as printed."""
    layer: str
    """Which layer stands for it."""
    rule: str = ""
    """Whose step the eigenvalues are measured of; empty if there is none."""
    gates: tuple[tuple[str, float, float], ...] = ()
    """Name and range of each gate, of those that the transition knows."""


LADDER = (
    Rung("I", "all 1; accumulation only", "normalized_linear_attention", "linear_attention"),
    Rung("scalar or diagonal, (0, 1)", "non-negative; forgetting", "mamba2(taps=0)", "gla", (("g", -5.0, 0.0),)),
    Rung("I − βkkᵀ, β in (0, 1)", "non-negative; targeted erasure", "delta_rule(taps=0)", "delta_rule",
         (("beta", 0.0, 1.0),)),
    Rung("same, β in (0, 2)", "signed; sign flips: parity", "delta_rule(taps=0,allow_neg_eigval=true)", "delta_rule",
         (("beta", 0.0, 2.0),)),
    Rung("product of n = 2 Householders", "signed, rank n; S3, S4", "delta_product(taps=0,forget_gate=false)",
         "delta_product", (("beta", 0.0, 2.0),)),
    Rung("dense nonlinear", "unrestricted; S5 and beyond", "RNN"),
)  # fmt: skip
QUICK = (("RNN", "S5"), ("mamba2(taps=0)", "S5"))
"""What the quick run trains; diagonal and ceiling."""


class PlainRNN(nn.Module):
    """A tanh recurrence in place of stream and layer: its input is the token alone."""

    def __init__(self, width: int) -> None:
        """Draw the weights."""
        super().__init__()
        self.rnn = nn.RNN(width, width, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run over ``[B, T, D]``."""
        return self.rnn(x)


def spectrum(rung: Rung, count: int = 400) -> dict[str, float]:
    """Return the extremes of a transition's eigenvalues, read out of the rule's own step on unit matrices."""
    width, generator = 2, torch.Generator().manual_seed(12)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)

    many = 2 if rung.rule == "delta_product" else 0
    k = torch.randn(count, *([many] if many else []), 1, width, generator=generator, dtype=torch.float64)
    k = k / k.norm(dim=-1, keepdim=True)
    tail = {"g": (1, width), "beta": (many, 1) if many else (1,)}
    gates: dict[str, Any] = {name: uniform(low, high, count, *tail[name]) for name, low, high in rung.gates}
    start = torch.eye(width, dtype=torch.float64).expand(count, 1, -1, -1)
    nothing = torch.zeros_like(k)
    q = k[:, 0] if many else k
    _, state = ops.step(rung.rule, q, k, nothing, state=start, **gates)
    values = torch.linalg.eigvals(state[:, 0])
    return {"low": values.real.min().item(), "high": values.real.max().item(), "turn": values.imag.abs().max().item()}


def layer_of(name: str, budget: Budget) -> Contender:
    """Return what a rung trains."""
    if name == "RNN":
        return Contender(name, lambda: [PlainRNN(budget.width)], "")
    return contender(name, budget.width, budget.heads)


def row(name: str, task: str, progress: Callable[[float], None]) -> Row:
    """Train one rung on one task, words growing from two letters on."""
    made = TASKS[task]
    budget = RNN_BUDGET if name == "RNN" else Budget(steps=STEPS[task], batch=128, enough=0.9999, judged=1024)
    stages: Sequence[Task] = ()
    if isinstance(made, WordProblem):
        stages = [WordProblem(group=made.group, letters=n) for n in range(2, LETTERS, 1 if task == "S5" else 2)]
    return trial(layer_of(name, budget), made, budget, 0, factors=FACTORS, stages=stages, progress=progress)


def run(settings: Settings) -> Result:
    """Measure every spectrum; train every rung on every task, or in the quick run the ceiling and a diagonal rule."""
    wanted = QUICK if settings.quick else [(rung.layer, task) for rung in LADDER for task in TASKS]
    rows: dict[str, dict[str, dict[str, object]]] = {}
    for number, (name, task) in enumerate(wanted):

        def told(fraction: float, done: int = number) -> None:
            settings.progress((done + fraction) / len(wanted))

        place = [rung.layer for rung in LADDER].index(name)
        made = partial(row, name, task, told)
        rows.setdefault(name, {})[task] = settings.part(f"{place}-{task}", lambda made=made: asdict(made()))
    return {
        "spectra": {rung.transition: spectrum(rung) for rung in LADDER if rung.rule},
        "rows": rows,
        "chance": {name: _last_chance(task) for name, task in TASKS.items()},
    }


def _last_chance(task: Task) -> float:
    return task.chances()[-1].item() if isinstance(task, WordProblem) else task.chance


def check(result: Result) -> None:
    """The RNN does S5 at the training's length, a diagonal rule does not; spectra are their rungs'."""
    signs = {"I": (1, 1), LADDER[1].transition: (0, 1), LADDER[2].transition: (0, 1), LADDER[3].transition: (-1, 1),
             LADDER[4].transition: (-1, 1)}  # fmt: skip
    for transition, (low, high) in signs.items():
        found = result["spectra"][transition]
        assert low - 1e-9 <= found["low"] <= low + 0.2, f"{transition}: the lowest eigenvalue is {found['low']:.3f}"
        assert high - 0.2 <= found["high"] <= high + 1e-9, f"{transition}: the highest is {found['high']:.3f}"
        turns = found["turn"] > 0.1
        assert turns == (transition == LADDER[4].transition), f"{transition}: eigenvalues turn by {found['turn']:.3f}"
    rnn, diagonal = (result["rows"][name]["S5"]["last"]["1"] for name in ("RNN", LADDER[1].layer))
    assert rnn >= 0.99, f"the RNN tells {rnn:.3f} of S5 at the training's length, wanted .99"
    assert diagonal <= 0.15, f"the diagonal rule tells {diagonal:.3f} of S5 at the last position, wanted near chance"
    for rung, task in ((LADDER[3], "parity"), (LADDER[4], "S3")):
        for learned in (result["rows"].get(rung.layer, {}).get(task),):
            if learned is not None:
                share = learned["last"]["1"]
                assert share >= 0.95, f"{rung.layer} tells {share:.3f} of {task} at the training's length"


def tables(result: Result) -> list[Table]:
    """The document's table 12.5.1, from measurements."""
    rows: list[tuple[str | int | float, ...]] = []
    for rung in LADDER:
        spectrum = result["spectra"].get(rung.transition)
        measured = "–" if spectrum is None else f"{spectrum['low']:+.2f} to {spectrum['high']:+.2f}" + (
            f", turning by {spectrum['turn']:.2f}" if spectrum["turn"] > 1e-6 else "")  # fmt: skip
        rows.append((rung.transition, rung.printed, measured, f"`{rung.layer}`", *_learned(result, rung.layer)))
    chance = ", ".join(f"{name} {x:.3f}" for name, x in result["chance"].items())
    note = (
        f"Last position at T = {LETTERS}, and at {LETTERS * FACTORS[-1]} after the arrow; one seed, words over two "
        f"generators. Likeliest answer at T = {LETTERS}: {chance}. Not trained: –."
    )
    columns = ("transition", "document", "eigenvalues, measured", "layer", *TASKS)
    return [Table("Table 12.5.1, from our runs", columns, rows, note)]


def _learned(result: Result, layer: str) -> list[str]:
    found = result["rows"].get(layer, {})
    last = FACTORS[-1]
    return [
        f"{found[task]['last']['1']:.3f} → {found[task]['last'][str(last)]:.3f}" if task in found else "–"
        for task in TASKS
    ]


def _draw(result: Result, axes: Axes) -> None:
    for number, (name, found) in enumerate(result["rows"].items()):
        if "S5" in found:
            lengths = [LETTERS * int(f) for f in found["S5"]["last"]]
            axes.plot(lengths, list(found["S5"]["last"].values()), "o-", color=f"C{number % 6}", label=name)
    axes.axhline(result["chance"]["S5"], color="#808080", linestyle="--")
    axes.set(xlabel="T", ylabel="words told at the last letter", ylim=(0, 1.05), title="S5 (dashed: chance)")
    axes.legend()


def figures(result: Result) -> list[Figure]:
    """Show S5 by length."""
    return [Figure("The ladder's ceiling", "Trained on words of at most 12 letters.", partial(_draw, result))]


EXPERIMENT = Experiment(
    name="B12",
    title="The ladder and its ceiling",
    claim="What a transition can track climbs with its structure; a plain nonlinear RNN does S₅, a diagonal rule not.",
    source="Dive into Deep Learning §12.5.5.2, table 12.5.1; Merrill et al. (2024), arXiv:2404.08819",
    setting="Words over two generators with a label at every letter, T = 12, judged to 48. Layers of width 64 and 2 "
    "heads without convolution, 400 to 600 updates of 128; the RNN 256 units, words growing from 2 letters to 12, at "
    "most 3,000 updates. Eigenvalues out of each rule's own step. Quick: S₅ by the RNN and by Mamba-2.",
    band="RNN at least .99 at the training's length, the diagonal rule at most .15 at the last position; in the full "
    "run parity by β up to 2 and S₃ by two reflections at least .95; eigenvalues in their rungs' intervals.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=300,
    quick_seconds=70,
)
