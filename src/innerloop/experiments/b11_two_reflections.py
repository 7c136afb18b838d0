"""B11: two reflections a token compose into a rotation, and track the words of S3; one cannot."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from innerloop import ops
from innerloop.checks import Form
from innerloop.data.tasks import WordProblem
from innerloop.data.tasks.words import Permutation
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 3
WORDS = {16: 1000, 64: 1000, 4096: 50}
CHUNKED = 10


class Cell(NamedTuple):
    """What each element writes: keys and strengths of its reflections."""

    k: Tensor
    """``[elements, n, POINTS]``"""
    beta: Tensor
    """``[elements, n]``, 2 or 0."""


def moved(p: Permutation) -> Tensor:
    """Return the matrix that moves point i to place ``p[i]``."""
    matrix = torch.zeros(POINTS, POINTS, dtype=torch.float64)
    matrix[list(p), list(range(POINTS))] = 1
    return matrix


def reflection(i: int, j: int) -> Tensor:
    """Return the unit axis whose reflection swaps places i and j."""
    axis = torch.zeros(POINTS, dtype=torch.float64)
    axis[i], axis[j] = 0.5**0.5, -(0.5**0.5)
    return axis


def nearest(p: Permutation, n: int) -> tuple[Tensor, Tensor]:
    """Return the axes and strengths of at most n swaps whose product is nearest to a permutation, by trying all."""
    axes = [reflection(i, j) for i, j in itertools.combinations(range(POINTS), 2)]
    best = None
    for count in range(n + 1):
        for chosen in itertools.product(axes, repeat=count):
            product = torch.eye(POINTS, dtype=torch.float64)
            for axis in chosen:
                product = product - 2 * axis[:, None] * (axis @ product)
            off = (product - moved(p)).norm().item()
            if best is None or off < best[0] - 1e-9:
                best = (off, chosen)
    assert best is not None
    k = torch.stack([*best[1], *[axes[0]] * (n - len(best[1]))])
    return k, torch.tensor([2.0] * len(best[1]) + [0.0] * (n - len(best[1])), dtype=torch.float64)


def cell(task: WordProblem, n: int) -> Cell:
    """Set a cell of n reflections a token by hand."""
    made = [nearest(p, n) for p in task.alphabet]
    return Cell(torch.stack([k for k, _ in made]), torch.stack([beta for _, beta in made]))


def follow(made: Cell, words: Tensor, form: Form = "recurrent") -> Tensor:
    """Run the cell over words ``[B, T]`` from the identity on and return the last state, ``[B, POINTS, POINTS]``."""
    k = made.k.float()[words][:, :, :, None]  # [B, T, n, 1, POINTS]
    beta = made.beta.float()[words][..., None]
    start = torch.eye(POINTS).expand(len(words), 1, -1, -1)
    _, state = ops.delta_product(
        k[:, :, 0], k, torch.zeros_like(k), beta=beta, initial_state=start, output_final_state=True, form=form
    )
    assert state is not None
    return state[:, 0]


def told(task: WordProblem, states: Tensor, right: Tensor) -> float:
    """Share of words whose element is the one whose matrix is nearest to the state."""
    places = torch.stack([moved(p) for p in task.elements]).float()
    off = (states[:, None] - places).flatten(2).norm(dim=-1)
    return (off.argmin(1) == right).double().mean().item()


def run(settings: Settings) -> Result:
    """Realise every element, then track words over all six."""
    task = WordProblem(group="S3", all_elements=True)
    cells = {n: cell(task, n) for n in (1, 2)}
    single = torch.arange(task.outputs)[:, None]
    matrices = torch.stack([moved(p) for p in task.elements])
    result: Result = {
        "rank": torch.linalg.matrix_rank(torch.eye(POINTS) - matrices).tolist(),
        "realised": {
            str(n): ((follow(made, single) - matrices).abs().amax((1, 2)) < 1e-6).tolist() for n, made in cells.items()
        },
        "words": {},
    }
    generator = torch.Generator().manual_seed(11)
    for done, (length, count) in enumerate(WORDS.items(), start=1):
        words, labels = WordProblem(group="S3", all_elements=True, letters=length).draw(count, generator)
        states = {n: follow(made, words) for n, made in cells.items()}
        chunked = follow(cells[2], words[:CHUNKED], "chunk")
        right = matrices[labels[:, -1]]
        result["words"][str(length)] = {
            "one": told(task, states[1], labels[:, -1]),
            "two": told(task, states[2], labels[:, -1]),
            "chunked": told(task, chunked, labels[:CHUNKED, -1]),
            "off": (states[2] - right).abs().max().item(),
        }
        settings.progress(done / len(WORDS))
    return result


def check(result: Result) -> None:
    """Two reflections always; one realises four of six and fails."""
    assert sorted(result["rank"]) == [0, 1, 1, 1, 2, 2], f"rank(I - P) is {result['rank']}"
    assert result["realised"]["2"] == [True] * 6, f"two reflections realise {sum(result['realised']['2'])} of 6"
    assert sum(result["realised"]["1"]) == 4, f"one reflection realises {sum(result['realised']['1'])} of 6, wanted 4"
    for rank, realised in zip(result["rank"], result["realised"]["1"], strict=True):
        assert realised == (rank < 2), f"one reflection and an element of rank {rank}: {realised}"
    assert set(result["words"]) == {str(length) for length in WORDS}, f"lengths run: {list(result['words'])}"
    for length, row in result["words"].items():
        for form in ("two", "chunked"):
            assert row[form] >= 1, f"two reflections ({form}) tell {row[form]:.4f} of words at T = {length}"
        assert row["off"] < 0.01, f"the state is {row['off']:.1e} from a permutation at T = {length}"
        assert row["one"] < 0.5, f"one reflection tells {row['one']:.3f} of words at T = {length}, wanted failure"


def tables(result: Result) -> list[Table]:
    """The elements, and words by length."""
    task = WordProblem(group="S3", all_elements=True)
    one, two = (["yes" if x else "no" for x in result["realised"][n]] for n in ("1", "2"))
    elements: list[tuple[str | int | float, ...]] = [
        (str(p), rank, a, b) for p, rank, a, b in zip(task.elements, result["rank"], one, two, strict=True)
    ]
    words: list[tuple[str | int | float, ...]] = [
        (length, count, *(f"{result['words'][str(length)][x]:.3f}" for x in ("one", "two", "chunked")),
         f"{result['words'][str(length)]['off']:.0e}")
        for length, count in WORDS.items()
    ]  # fmt: skip
    return [
        Table("The six elements", ("element", "rank(I − P)", "by one reflection", "by two"), elements),
        Table(
            "Words over all six, told by the last state",
            ("T", "words", "n = 1", "n = 2", "n = 2 in chunks", "n = 2: state off by"),
            words,
            "Chance is 1/6. The document asks for T up to 64 (exercise 6) and prints no number.",
        ),
    ]


def _draw(result: Result, axes: Axes) -> None:
    lengths = [int(length) for length in result["words"]]
    for name, label, colour in (("two", "two reflections", "C0"), ("one", "one reflection", "C1")):
        axes.plot(lengths, [row[name] for row in result["words"].values()], "o-", color=colour, label=label)
    axes.axhline(1 / 6, color="C2", linestyle=":", label="chance")
    axes.set(xlabel="T", ylabel="words told", xscale="log", ylim=(0, 1.05), title="Words over S3, set by hand")
    axes.legend()


def figures(result: Result) -> list[Figure]:
    """Show words told by length."""
    caption = "No training: axes and strengths are set."
    return [Figure("A rotation takes two reflections", caption, partial(_draw, result))]


EXPERIMENT = Experiment(
    name="B11",
    title="S₃ by two reflections",
    claim="A product of two reflections a token tracks S₃ exactly at any length; one reflection cannot, for a 3-cycle "
    "has rank(I − P) = 2.",
    source="Dive into Deep Learning §12.5.7, exercise 6; Siems et al. (2025), arXiv:2502.10297",
    setting="`ops.delta_product` from the identity of three points, axes (e_i − e_j)/√2 at strength 2, for n = 1 the "
    "nearest single reflection; float32; random words over all six elements, 1,000 of 16 and 64 letters, 50 of 4,096.",
    band="n = 2 exactly 1 at every length, in chunks too; n = 1 realises four of six elements and fails.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=5,
)
