"""C4: one recall watched, and what the memory would answer to every key after each token."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from innerloop.experiments.blocks.recall import KEYS, PAIRS, chances, draw, spell, train
from innerloop.experiments.c01_recall import STEPS
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table
from innerloop.inspect import trace
from innerloop.report.walk import Walk

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEQUENCE = "k6 v5 k2 v11 k1 v10 k3 v11 k2"
ANSWER = "v11"


def run(settings: Settings) -> Result:
    """Let C1's block at seed 1 answer the document's list, and ask it for every key on the way."""
    block, _ = train(1, STEPS, progress=settings.progress)
    sequences, answers = draw(1, PAIRS, torch.Generator().manual_seed(123))
    sequence = sequences[0]
    # What is asked after the last value is the document's question: the query itself is no part of the list.
    likely, answer = chances(block, sequence).max(-1)  # [T, keys]
    spelled = [[spell(KEYS + value) for value in row] for row in answer.tolist()]
    names = [spell(token) for token in sequence.tolist()]
    with torch.no_grad():
        inside = trace("momentum_delta_rule", **block.writes(sequence[None]), tokens=names)
    return {
        "sequence": names,
        "right": spell(KEYS + int(answers[0])),
        "answers": spelled[:-1],
        "chances": likely[:-1].tolist(),
        "trace": inside.to_dict(),
        "steps": [list(map(list, zip(*row, strict=True))) for row in zip(spelled, likely.tolist(), strict=True)],
    }


def said(result: Result) -> str:
    """The block's answer to the query."""
    return result["answers"][-1][int(result["sequence"][-1][1:])]


def check(result: Result) -> None:
    """The list is the document's, its question is answered, and so would any other have been, from its value on."""
    got = " ".join(result["sequence"])
    assert got == SEQUENCE, f"the list is {got}, the document's {SEQUENCE}: the draws differ"
    assert said(result) == result["right"] == ANSWER, f"it says {said(result)}, right is {result['right']}"
    inside, length = result["trace"], len(result["sequence"])
    assert inside["tokens"] == result["sequence"], f"the trace is of {inside['tokens']}"
    worst = min(inside["surprise"][0])
    assert worst > 0 and len(result["steps"]) == length, f"{len(result['steps'])} steps, least surprise {worst}"
    listed = result["sequence"][:-1]
    for key, value in bindings(result).items():
        row = int(key[1:])
        for written in range(listed.index(key) + 1, len(listed)):
            answer, chance = result["answers"][written][row], result["chances"][written][row]
            assert answer == value, f"asked for {key} after token {written + 1} it says {answer}, wrote {value}"
            assert chance > 0.5, f"asked for {key} after token {written + 1} it gives {value} a chance of {chance:.2f}"


def walk(result: Result) -> Walk:
    """Return the recall as a page to step through."""
    return Walk(
        f"One recall: asked for {result['sequence'][-1]}",
        result["trace"],
        intro="Keys and values in turn, then the key that is asked for. A read is a sum over the values written.",
        asked=tuple(f"k{key}" for key in range(KEYS)),
        answers=tuple(tuple((answer, chance) for answer, chance in row) for row in result["steps"]),
        right=bindings(result),
    )


def bindings(result: Result) -> dict[str, str]:
    """Each key of the list and its value."""
    listed = result["sequence"][:-1]
    return dict(zip(listed[::2], listed[1::2], strict=True))


def tables(result: Result) -> list[Table]:
    """The list, the question and the answer."""
    columns = ("", "document", "ours")
    rows: list[tuple[str | int | float, ...]] = [
        ("list and key asked for", SEQUENCE, " ".join(result["sequence"])),
        ("answer", ANSWER, said(result)),
        ("right answer", ANSWER, result["right"]),
    ]
    inside = result["trace"]
    lines: list[tuple[str | int | float, ...]] = [
        (token, *(f"{inside[name][0][t]:.3f}" for name in ("surprise", "written", "rank")), _life(inside, t),
         inside["tokens"][inside["returned"][0][t]])
        for t, token in enumerate(inside["tokens"])
    ]  # fmt: skip
    heads = ("token", "surprise", "share written", "effective rank", "half-life", "its read returns mostly")
    note = "Surprise is |v − m(k)| before the write; the half-life in tokens, – beyond the list."
    return [
        Table("One recall", columns, rows, "Drawn by the document's generator at seed 123."),
        Table("Inside the memory", heads, lines, note),
    ]


def _life(inside: dict[str, Any], t: int) -> str:
    life = inside["half_life"][0][t]
    return "–" if life is None else str(life)


def _draw(result: Result, axes: Axes) -> None:
    listed, bound = result["sequence"][:-1], bindings(result)
    shares = [[row[key] for row in result["chances"]] for key in range(KEYS)]
    axes.imshow(shares, cmap="viridis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    for column, answers in enumerate(result["answers"]):
        for key, answer in enumerate(answers):
            # Off-black and off-white: pure ones follow the page's theme, and the heat map does not.
            ink = "#111111" if shares[key][column] > 0.6 else "#eeeeee"
            right = bound.get(f"k{key}") == answer and f"k{key}" in listed[:column]
            weight = "bold" if right else "normal"
            axes.text(column, key, answer, color=ink, ha="center", va="center", fontsize=7, fontweight=weight)
    axes.set_xticks(range(len(listed)), listed)
    axes.set_yticks(range(KEYS), [f"k{key}" for key in range(KEYS)])
    axes.set(xlabel="after token", ylabel="key asked for", title=f"Asked for {result['sequence'][-1]}: {said(result)}")


def figures(result: Result) -> list[Figure]:
    """Show the answer to every key after each token."""
    caption = (
        "What the block would answer to each key (rows) after each token (columns), brighter where it is surer; "
        "bold: the value that the list has bound to this key so far."
    )
    return [Figure("What the memory holds", caption, partial(_draw, result))]


EXPERIMENT = Experiment(
    name="C4",
    title="One recall, watched",
    claim="The memory answers a key with its value from the moment both were written.",
    source="NL-3 aside, Training a HOPE block: §6",
    setting="C1's block at seed 1 on the document's list (generator seeded 123); after each token every key is asked.",
    band="The document's list and its answer; each key of the list is answered with its value from then on, "
    "with a chance above one half.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    walk=walk,
    seconds=1,
)
