"""D1: rounding in a stream grows at most as the root of its length where nothing fades, and not where it does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from innerloop import ops, testing
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table
from innerloop.rule import State, get

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RULES = ("mamba2", "gated_delta_rule", "momentum_delta_rule")
DECAYS = (1.0, 0.999, 0.9)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PIECE, WIDTH = 2048, 8
FULL, QUICK = 2**20, 2**14
EPSILON = torch.finfo(torch.float32).eps
GROWTH = 0.5
"""c of the bound c sqrt(T) eps, without decay."""
FLAT, FADING = 3.0, 16 * EPSILON
"""With decay: how much the error may exceed that of the first two pieces, and what it may be at all."""


def draw_piece(rule: str, number: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Draw one piece of a stream, the same for every precision: unit keys, rates around a half, a head a decay."""
    generator = torch.Generator().manual_seed(number)
    q, k, v = (torch.randn(1, PIECE, 1, WIDTH, generator=generator, dtype=torch.float64) for _ in range(3))
    rate = torch.rand(1, PIECE, 1, generator=generator, dtype=torch.float64).expand(-1, -1, len(DECAYS))
    decay = torch.tensor(DECAYS, dtype=torch.float64).expand_as(rate)
    gates = {
        "mamba2": {"g": decay.log()},
        "gated_delta_rule": {"g": decay.log(), "beta": rate},
        "momentum_delta_rule": {"theta": rate, "eta": torch.full_like(rate, 0.5), "alpha": 1 - decay},
    }[rule]
    tokens = {"q": q / q.norm(dim=-1, keepdim=True), "k": k / k.norm(dim=-1, keepdim=True)}
    tokens["v"] = v.expand(-1, -1, len(DECAYS), -1)
    # Gates stay in float32 beside half inputs: in bfloat16 a decay of 0.999 would be none.
    return {**{x: y.to(dtype) for x, y in tokens.items()}, **{x: y.float() for x, y in gates.items()}}


def stream(rule: str, dtype: torch.dtype, pieces: int) -> Iterator[tuple[int, list[float]]]:
    """Run a stream in pieces, and the float64 chunk form on the same numbers beside it.

    Yields:
        Tokens so far, and the error of the state by decay, at every doubling.
    """
    state: State = None
    exact: State = None
    for number in range(pieces):
        piece: dict[str, Any] = draw_piece(rule, number, dtype)
        wide: dict[str, Any] = {name: x.double() for name, x in piece.items()}
        with torch.no_grad():
            _, state = ops.run(rule, **piece, initial_state=state, output_final_state=True)
            _, exact = ops.run(rule, **wide, initial_state=exact, output_final_state=True, form="chunk")
        if (number + 1) & number == 0:
            pairs = list(zip(*(get(rule).state_tensors(x) for x in (state, exact)), strict=True))
            heads = range(len(DECAYS))
            yield (number + 1) * PIECE, [max(testing.error(x[:, h], y[:, h]) for x, y in pairs) for h in heads]


def run(settings: Settings) -> Result:
    """Stream every rule at every decay and dtype."""
    pieces = (QUICK if settings.quick else FULL) // PIECE
    curves: list[dict[str, Any]] = []
    cases = [(rule, name) for rule in RULES for name in DTYPES]
    for number, (rule, name) in enumerate(cases):
        tokens, errors = zip(*stream(rule, DTYPES[name], pieces), strict=True)
        for decay, own in zip(DECAYS, zip(*errors, strict=True), strict=True):
            curves.append({"rule": rule, "decay": decay, "dtype": name, "tokens": tokens, "errors": own})
        settings.progress((number + 1) / len(cases))
    return {"curves": curves}


def check(result: Result) -> None:
    """Hold every error to the bound: c sqrt(T) eps without decay; flat and small with it."""
    assert len(result["curves"]) == len(RULES) * len(DECAYS) * len(DTYPES), "not all 18 curves are there"
    for curve in result["curves"]:
        words = f"{curve['rule']} at decay {curve['decay']} in {curve['dtype']}"
        first = max(curve["errors"][:2])
        for tokens, error in zip(curve["tokens"], curve["errors"], strict=True):
            bar = GROWTH * math.sqrt(tokens) * EPSILON if curve["decay"] == 1 else min(FLAT * first, FADING)
            assert 0 <= error <= bar, f"{words} errs by {error:.1e} after {tokens} tokens, wanted <= {bar:.1e}"


def tables(result: Result) -> list[Table]:
    """Errors at the first doubling and the last, by rule and decay."""
    found = {(x["rule"], x["decay"], x["dtype"]): x for x in result["curves"]}
    last = result["curves"][0]["tokens"][-1]
    rows: list[tuple[str | int | float, ...]] = []
    for rule in RULES:
        for decay in DECAYS:
            single, half = (found[rule, decay, name]["errors"] for name in DTYPES)
            bound = f"{GROWTH * math.sqrt(last) * EPSILON:.1e}" if decay == 1 else f"{FADING:.1e}"
            rows.append((f"`{rule}`", decay, *(f"{x:.1e}" for x in (single[0], single[-1], half[0], half[-1])), bound))
    columns = (
        "rule", "decay", f"float32, T = {PIECE:,}", f"float32, T = {last:,}", f"bfloat16, T = {PIECE:,}",
        f"bfloat16, T = {last:,}", "bound at the last",
    )  # fmt: skip
    note = (
        "Largest deviation of the state from the float64 chunk form on the same numbers, relative to its largest entry."
    )
    return [Table("Error of a streamed state", columns, rows, note)]


def _draw(result: Result, *panels: Axes) -> None:
    for axes, rule in zip(panels, RULES, strict=True):
        for decay, color in zip(DECAYS, ("C0", "C1", "C2"), strict=True):
            for name, line in zip(DTYPES, ("o-", "s--"), strict=True):
                (curve,) = (x for x in result["curves"] if (x["rule"], x["decay"], x["dtype"]) == (rule, decay, name))
                errors = [max(error, 1e-9) for error in curve["errors"]]
                axes.loglog(curve["tokens"], errors, line, color=color, markersize=3, label=f"{decay:g}, {name}")
        tokens = result["curves"][0]["tokens"]
        bound = [GROWTH * math.sqrt(x) * EPSILON for x in tokens]
        axes.loglog(tokens, bound, color="C3", linestyle=":", label="bound without decay")
        axes.set(xlabel="tokens", ylabel="relative error of the state", title=rule, ylim=(3e-9, 2 * bound[-1]))
        axes.minorticks_off()
        ends = (tokens[0], tokens[-1])
        axes.set_xticks(ends, labels=[f"{x:,}" for x in ends])
    panels[0].legend(fontsize="xx-small", loc="lower right", ncols=2, columnspacing=1, handlelength=1.5)


def figures(result: Result) -> list[Figure]:
    """Show the error over the length of the stream, a panel a rule."""
    caption = "The error of a state that is carried in float32 from piece to piece, by decay a token and input dtype."
    return [Figure("Rounding in a stream", caption, partial(_draw, result), panels=len(RULES))]


EXPERIMENT = Experiment(
    name="D1",
    title="A stream of a million tokens",
    claim="A state that never fades gathers rounding no faster than the square root of the tokens; one that fades "
    "stays as exact as it began.",
    source="This library, docs/design.md, Truth and bars",
    setting=f"`{'`, `'.join(RULES)}` in pieces of {PIECE:,} tokens, {FULL:,} in all (quick: {QUICK:,}), heads of "
    f"width {WIDTH}, one each for decays of {', '.join(f'{x:g}' for x in DECAYS)} a token, rates uniform in "
    "[0, 1), seeds by piece; the float64 chunk form runs beside it.",
    band=f"Without decay at most {GROWTH:g} sqrt(T) eps at every doubling; with it at most {FADING / EPSILON:g} eps, "
    f"and at most {FLAT:g} times the error of the first two doublings.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=40,
    quick_seconds=4,
)
