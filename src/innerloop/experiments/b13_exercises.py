"""B13: exercises 1 to 5 of the DeltaNet section, each with a check."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from innerloop import ops
from innerloop.checks import Form
from innerloop.data.tasks import Capacity
from innerloop.experiments.blocks.overwriting import Write, trained_recall
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table
from innerloop.inspect.reading import answer
from innerloop.rule import get

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 64
PAIRS = (2, 4, 8, 16, 32, 48)
TRIALS = 40
RULES: dict[str, dict[str, Any]] = {
    "linear_attention": {},
    "delta_rule": {"beta": 1.0},
    "longhorn": {"beta": 4.0},
    "momentum_delta_rule": {"theta": 0.5, "eta": 0.2, "alpha": 0.0},
    "recursive_least_squares": {"ridge": 1e-3},
    "softmax_attention": {},
}
"""Gates at every token; attention's scores are 16 times a cosine."""
CHUNKS = (4, 16, 64)
SHARES = (0.25, 0.5, 1.0, 2.0, 4.0)


def doubled_gate(settings: Settings) -> dict[str, float]:
    """Exercise 1: train the delta write with sigma and with 2 sigma."""
    repeats, epochs = (2, 6) if settings.quick else (4, 12)
    writes: tuple[Write, ...] = ("delta", "doubled")
    return {w: settings.part(w, lambda w=w: {"recall": trained_recall(w, repeats, epochs)})["recall"] for w in writes}


def neighbours(generator: torch.Generator) -> dict[str, Any]:
    """Exercise 2: rewrite one of eight random keys, and see what that does to the others' answers."""
    keys, rewrites = 8, 200
    overlaps, damages, own, others = [], [], [], []
    for _ in range(rewrites):
        k, v = _units(keys, generator), _units(keys + 1, generator)
        _, state = ops.delta_rule(*_row(k, k, v[:-1]), beta=torch.ones(1, keys, 1).double(), output_final_state=True)
        assert state is not None
        _, after = ops.step("delta_rule", *(x[:, None] for x in (k[:1], k[:1], v[-1:])), state=state,
                            beta=torch.ones(1, 1).double())  # fmt: skip
        surprise = v[-1] - k[0] @ state[0, 0]
        moved = k[1:] @ (after - state)[0, 0]
        overlaps += (k[1:] @ k[0]).abs().tolist()
        damages += (moved.norm(dim=-1) / surprise.norm()).tolist()
        own.append((k[0] @ after[0, 0] - v[-1]).norm().item())
        others += (k[1:] @ after[0, 0] - v[1:-1]).norm(dim=-1).tolist()
    off = max(abs(a - b) for a, b in zip(overlaps, damages, strict=True))
    return {"overlaps": overlaps[:300], "damages": damages[:300], "off": off, "own": max(own),
            "others": sum(others) / len(others)}  # fmt: skip


def capacity(generator: torch.Generator) -> dict[str, list[float]]:
    """Exercise 3: square error of n pairs under n random keys, a part of the values' square, by rule."""
    errors: dict[str, list[float]] = {}
    for name, gates in RULES.items():
        for n in PAIRS:
            pairs = Capacity(pairs=n, key_width=WIDTH, value_width=WIDTH).told(TRIALS, generator)
            k, v = (x.double()[:, :, None] for x in pairs)
            errors.setdefault(name, []).append(sum(_error(name, gates, k[b], v[b]) for b in range(TRIALS)) / TRIALS)
    return errors


def _error(name: str, gates: dict[str, float], k: Tensor, v: Tensor) -> float:
    given: dict[str, Any] = {g: x if g == "ridge" else torch.full((1, len(k), 1), x).double() for g, x in gates.items()}
    _, state = ops.run(name, k[None], k[None], v[None], **given, output_final_state=True)
    read = answer(get(name), state, k, gates, 16.0)
    return ((read - v).square().sum() / v.square().sum()).item()


def substitution(generator: torch.Generator) -> float:
    """Exercise 4: solve the chunk's unit triangular system by an explicit loop and by the library's call."""
    off = 0.0
    for C in CHUNKS:
        k = _units(C, generator)
        right = torch.randn(C, WIDTH, generator=generator, dtype=torch.float64)
        coupling = (k @ k.T).tril(-1)
        rows: list[Tensor] = []
        for t in range(C):
            past = torch.stack(rows) if rows else right[:0]
            rows.append(right[t] - coupling[t, :t] @ past)
        solved = torch.linalg.solve_triangular(coupling, right, upper=False, unitriangular=True)
        off = max(off, ((torch.stack(rows) - solved).abs().max() / solved.abs().max()).item())
    return off


def share_of_solve(ratio: float) -> float:
    """Return the solve's part of the arithmetic at C / d: C^2 d beside the two products of 2 C d^2 around it."""
    return ratio / (ratio + 4)


def gated_chunk(generator: torch.Generator) -> dict[str, float]:
    """Exercise 5: the gated rule in chunks against its token loop, values and gradients."""
    T, off, slope = 96, 0.0, 0.0
    q, k, v = (torch.randn(1, T, 1, 32, generator=generator, dtype=torch.float64) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    g, beta = -torch.rand(1, T, 1, generator=generator).double(), torch.rand(1, T, 1, generator=generator).double()
    found = []
    forms: list[tuple[Form, int | None]] = [("recurrent", None), *(("chunk", C) for C in CHUNKS)]
    for form, size in forms:
        leaves = [x.clone().requires_grad_() for x in (q, k, v, g, beta)]
        o, _ = ops.gated_delta_rule(*leaves[:3], g=leaves[3], beta=leaves[4], form=form, chunk_size=size)
        found.append((o.detach(), torch.autograd.grad(o.square().sum(), leaves)))
    (o, grads), *chunked = found
    for other, theirs in chunked:
        off = max(off, ((other - o).abs().max() / o.abs().max()).item())
        slope = max(slope, *(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(theirs, grads, strict=True)))
    return {"value": off, "gradient": slope}


def _units(count: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(x, dim=-1)


def _row(*tensors: Tensor) -> list[Tensor]:
    return [x[None, :, None] for x in tensors]


def run(settings: Settings) -> Result:
    """Do the five exercises."""
    generator = torch.Generator().manual_seed(13)
    result: Result = {
        "neighbours": neighbours(generator),
        "capacity": capacity(generator),
        "substitution": substitution(generator),
        "gated": gated_chunk(generator),
    }
    settings.progress(0.2)
    return result | {"doubled": doubled_gate(settings)}


def check(result: Result) -> None:
    """Each exercise's statement."""
    for write in ("delta", "doubled"):
        recall = result["doubled"][write]
        assert recall > 0.95, f"exercise 1: the {write} gate recalls {recall:.3f}, wanted above .95 with both"
    near = result["neighbours"]
    assert near["off"] < 1e-10, f"exercise 2: damage is {near['off']:.1e} from the overlap's part of the surprise"
    own, others = near["own"], near["others"]
    assert own < 1e-10 and others > 0.05, f"exercise 2: the key rewritten errs by {own:.1e}, others by {others:.3f}"
    laws = {name: _law(errors) for name, errors in result["capacity"].items()}
    low, high = laws["linear_attention"]
    assert 0.9 <= low <= high <= 1.1, f"exercise 3: addition errs by {low:.2f} to {high:.2f} of (n - 1) / d"
    low, high = laws["delta_rule"]
    assert 0.35 <= low <= high <= 0.8, f"exercise 3: the delta rule errs by {low:.2f} to {high:.2f} of (n - 1) / d"
    exact = max(result["capacity"]["recursive_least_squares"])
    assert exact < 1e-3, f"exercise 3: the exact fit errs by {exact:.1e} with fewer pairs than channels"
    assert result["substitution"] < 1e-12, f"exercise 4: the loop and the solve differ by {result['substitution']:.1e}"
    gated = result["gated"]
    assert gated["value"] < 1e-12 and gated["gradient"] < 1e-11, f"exercise 5: chunks differ by {gated}"


def _law(errors: list[float]) -> tuple[float, float]:
    """Return the least and the largest ratio of errors to (n - 1) / d, from eight pairs on."""
    ratios = [error * WIDTH / (n - 1) for n, error in zip(PAIRS, errors, strict=True) if n >= 8]
    return min(ratios), max(ratios)


def tables(result: Result) -> list[Table]:
    """The statements beside the numbers; the capacity of every rule; the cost of the solve."""
    near, gated = result["neighbours"], result["gated"]
    rows: list[tuple[str | int | float, ...]] = [
        ("1", "a gate to 2 leaves overwrite recall unchanged", f"to 1 {result['doubled']['delta']:.3f}, to 2 "
         f"{result['doubled']['doubled']:.3f}"),
        ("2", "damage to a neighbour is the overlap's part of the surprise", f"to {near['off']:.0e}; error of the key "
         f"rewritten {near['own']:.0e}, of the others {near['others']:.3f}"),
        ("3", "delta obeys the (n − 1)/d law", "error / law {:.2f} to {:.2f}".format(*_law(
            result["capacity"]["delta_rule"]))),
        ("4", "substitution by a loop is the triangular solve", f"to {result['substitution']:.0e}"),
        ("5", "the gated chunk is the token loop", f"to {gated['value']:.0e}, gradients {gated['gradient']:.0e}"),
    ]  # fmt: skip
    laws: list[tuple[str | int | float, ...]] = [
        (f"`{name}`", *(f"{error:.3f}" for error in errors)) for name, errors in result["capacity"].items()
    ]
    laws.insert(0, ("(n − 1) / d", *(f"{(n - 1) / WIDTH:.3f}" for n in PAIRS)))
    cost: list[tuple[str | int | float, ...]] = [(f"{x:g}", f"{100 * share_of_solve(x):.0f} %") for x in SHARES]
    return [
        Table("Five exercises", ("exercise", "statement", "found"), rows),
        Table(
            f"Square error of n pairs under random keys, d = {WIDTH}",
            ("rule", *(f"n = {n}" for n in PAIRS)),
            laws,
            "A part of the values' square. The delta rule mends staleness, not crowding: it errs by about half of the "
            "law, because only later writes disturb a pair. Solving mends crowding, and attention, whose state grows.",
        ),
        Table(
            "The solve's part of a chunk's arithmetic",
            ("C / d", "part"),
            cost,
            "C²d beside the two products of 2Cd² around it: a tenth at C = 0.44 d.",
        ),
    ]


def _draw(result: Result, law: Axes, near: Axes) -> None:
    for number, (name, errors) in enumerate(result["capacity"].items()):
        law.plot([(n - 1) / WIDTH for n in PAIRS], errors, "o-", color=f"C{number % 6}", label=name)
    most = (PAIRS[-1] - 1) / WIDTH
    law.plot([0, most], [0, most], color="#808080", linestyle=":", label="the law")
    law.set(xlabel="(n − 1) / d", ylabel="square error", title="Capacity")
    law.legend(fontsize="x-small")
    near.plot(result["neighbours"]["overlaps"], result["neighbours"]["damages"], ".", color="C0")
    near.set(xlabel="overlap of two keys", ylabel="change / surprise", title="Damage to a neighbour")


def figures(result: Result) -> list[Figure]:
    """Show the capacity law, and damage by overlap."""
    caption = "First the error of n pairs by rule; then what rewriting one key does to the answer of another."
    return [Figure("Crowding and neighbours", caption, partial(_draw, result), panels=2)]


EXPERIMENT = Experiment(
    name="B13",
    title="Exercises 1 to 5",
    claim="The delta rule mends staleness, not crowding; its chunk form is a triangular solve.",
    source="Dive into Deep Learning §12.5.7, exercises 1 to 5",
    setting=f"1: B2's model at R = 4, 12 epochs (quick: R = 2, 6 epochs). 2: 8 random unit keys in {WIDTH} dimensions, "
    f"one rewritten, 200 times. 3: n random unit keys, {TRIALS} draws. 4 and 5: chunks of 4, 16, 64, float64; seed 13.",
    band="1: both above .95. 2: damage is overlap times surprise to 1e-10. 3: addition's error 0.9 to 1.1 and the "
    "delta rule's 0.35 to 0.8 times (n − 1)/d, the exact fit's below 1e-3. 4: 1e-12. 5: 1e-12, gradients 1e-11.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=40,
    quick_seconds=15,
)
