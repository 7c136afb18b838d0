"""A10: Titans with a linear memory is the delta rule; momentum keeps writing values that were superseded."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from innerloop import ops, testing
from innerloop.checks import Form
from innerloop.experiments.b01_overwriting import KEYS, REPEATS, TRIALS, VALUES, WIDTH, Overwrites, draw_overwrites
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RECALL = (1.000, 0.927, 0.185, 0.100)
ETA = 0.8
FORMS: tuple[Form, ...] = ("recurrent", "chunk")
SWEEP = (0.0, 0.6, 0.8)


def identity_deviation(generator: torch.Generator) -> float:
    """Compare the momentum rule without momentum and forgetting with the delta rule: outputs and final state."""
    q, k, v = (torch.randn(2, 100, 2, width, generator=generator, dtype=torch.float64) for width in (12, 12, 9))
    k = k / k.norm(dim=-1, keepdim=True)
    theta = 2 * torch.rand(2, 100, 2, generator=generator, dtype=torch.float64)
    start = torch.randn(2, 2, 12, 9, generator=generator, dtype=torch.float64)
    truth, end = ops.delta_rule(
        q, k, v, beta=theta, scale=1.0, initial_state=start, output_final_state=True, form="recurrent"
    )
    off = torch.zeros_like(theta)
    resting = ops.MomentumState(start, torch.zeros_like(start))
    errors = []
    for form in FORMS:
        o, state = ops.momentum_delta_rule(
            q, k, v, theta=theta, eta=off, alpha=off, initial_state=resting, output_final_state=True, form=form
        )
        assert state is not None and end is not None
        errors += [testing.error(o, truth), testing.error(state.S, end)]
    return max(errors)


def network_deviation(generator: torch.Generator) -> float:
    """Compare Titans of one layer, in mini-batches of one token, with the momentum rule: outputs and final state."""
    q, k, v = (torch.randn(2, 60, 2, width, generator=generator, dtype=torch.float64) for width in (12, 12, 9))
    k = k / k.norm(dim=-1, keepdim=True)
    theta, eta, alpha = torch.rand(3, 2, 60, 2, generator=generator, dtype=torch.float64)
    weights = torch.zeros(2, 12, 9, dtype=torch.float64)
    truth, end = ops.momentum_delta_rule(
        q, k, v, theta=theta, eta=eta, alpha=alpha, output_final_state=True, form="recurrent"
    )
    o, state = ops.titans(
        q, k, v, theta=theta, eta=eta, alpha=alpha, weights=(weights,), mini_batch=1, output_final_state=True
    )
    assert state is not None and end is not None
    return max(testing.error(o, truth), testing.error(state.weights[0], end.S), testing.error(state.momentum[0], end.U))


def recall(task: Overwrites, eta: float) -> float:
    """Write a task's stream with theta = 1 and no forgetting, and score the memory that is left."""
    ones = torch.ones(task.k.shape[:3], dtype=task.k.dtype)
    _, state = ops.momentum_delta_rule(
        task.k, task.k, task.v, theta=ones, eta=eta * ones, alpha=0 * ones, output_final_state=True
    )
    assert state is not None
    return task.recall(state.S)


def run(settings: Settings) -> Result:
    """Check the identity, then the overwrite task at several momenta."""
    deviation = identity_deviation(torch.Generator().manual_seed(10))
    network = network_deviation(torch.Generator().manual_seed(11))
    rng = np.random.default_rng(0)
    recalls: dict[str, list[float]] = {str(eta): [] for eta in SWEEP}
    for repeats in REPEATS:
        task = draw_overwrites(rng, repeats)
        for eta in SWEEP:
            recalls[str(eta)].append(recall(task, eta))
        settings.progress(repeats / REPEATS[-1])
    return {"identity": deviation, "network": network, "recall": recalls}


def check(result: Result) -> None:
    """The identity to rounding, and recall at eta = 0.8 within the stated band."""
    assert result["identity"] <= 1e-12, f"without momentum the rule is {result['identity']:.1e} from the delta rule"
    assert result["network"] <= 1e-12, f"Titans of one layer is {result['network']:.1e} from the momentum rule"
    for repeats, theirs, ours in zip(REPEATS, RECALL, result["recall"][str(ETA)], strict=True):
        assert abs(ours - theirs) <= 0.04, f"recall at {repeats} writes a key is {ours:.3f}, printed {theirs}"
    pure = result["recall"]["0.0"]
    assert min(pure) >= 1, f"without momentum recall should be exactly 1 at every count; got {pure}"


def tables(result: Result) -> list[Table]:
    """Recall of the latest value by overwrites per key."""
    columns = ("overwrites per key", "document", "ours, eta 0.8", "ours, eta 0 (the delta rule)")
    numbers = zip(REPEATS, RECALL, result["recall"][str(ETA)], result["recall"]["0.0"], strict=True)
    rows: list[tuple[str | int | float, ...]] = [(row[0], *(f"{number:.3f}" for number in row[1:])) for row in numbers]
    note = f"Without momentum and forgetting the rule is the delta rule: relative deviation {result['identity']:.1e}. "
    note += f"innerloop.ops.titans of one layer, in mini-batches of one, is the momentum rule: {result['network']:.1e}."
    return [Table("Recall of the latest value under momentum", columns, rows, note)]


def _draw(result: Result, axes: Axes) -> None:
    for index, eta in enumerate(SWEEP):
        axes.plot(REPEATS, result["recall"][str(eta)], "o-", color=f"C{index}", markersize=4, label=f"eta = {eta:g}")
    axes.plot(REPEATS, RECALL, "x", color="C4", markersize=9, label="document, eta = 0.8")
    axes.axhline(1 / VALUES, color="C5", linestyle=":", label="chance")
    axes.set(xlabel="writes per key", ylabel="recall of the latest value", ylim=(0, 1.05), title="Momentum blurs edits")
    axes.set_xticks(REPEATS)
    axes.legend(loc="upper right", bbox_to_anchor=(1.0, 0.95))


def figures(result: Result) -> list[Figure]:
    """Show recall over writes per key for several momenta."""
    caption = "The more momentum, the longer a superseded value goes on being written."
    return [Figure("Momentum is a softer overwriter", caption, partial(_draw, result))]


EXPERIMENT = Experiment(
    name="A10",
    title="Momentum keeps writing the past",
    claim="Titans with a linear memory and eta = alpha = 0 is the delta rule; momentum keeps writing old values.",
    source="Dive into Deep Learning §12.6, Learning at Test Time: Titans",
    setting=f"Overwrite task of B1: {KEYS} orthonormal keys in {WIDTH} dimensions, {VALUES} unit values, {TRIALS} "
    f"streams, theta = 1, eta = {ETA}, alpha = 0, seed 0; float64.",
    band="Identities within 1e-12; recall within 0.04 of each printed number.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=2.6,
)
