"""B1: an additive memory cannot bind a key anew; the delta write can."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from innerloop import ops
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REPEATS = (1, 2, 4, 8)
KEYS, VALUES, WIDTH, TRIALS = 8, 32, 64, 200
HEBBIAN = (1.000, 0.510, 0.299, 0.217)
DELTA = (1.000, 1.000, 1.000, 1.000)


@dataclass(frozen=True)
class Overwrites:
    """Many streams of writes that bind few keys again and again, and the answer that is right at the end."""

    k: Tensor
    """Keys written, ``[B, T, 1, K]``."""
    v: Tensor
    """Values written, ``[B, T, 1, V]``."""
    keys: Tensor
    """The orthonormal keys, ``[B, 8, K]``."""
    codebook: Tensor
    """The unit values, ``[B, 32, V]``."""
    latest: Tensor
    """Which value each key was bound to last, ``[B, 8]``."""

    def recall(self, state: Tensor) -> float:
        """Share of keys for which the codebook entry nearest to the read is the latest value."""
        read = torch.einsum("bkv,bnk->bnv", state[:, 0], self.keys)
        score = torch.einsum("bcv,bnv->bnc", self.codebook, read)
        # Two superposed values tie exactly, v1·(v1 + v2) = v2·(v1 + v2), and rounding would choose; m tied count 1/m.
        nearest = score > score.amax(-1, keepdim=True) - 1e-9
        hit = nearest.gather(-1, self.latest[..., None])[..., 0]
        return (hit / nearest.sum(-1)).double().mean().item()


def draw_overwrites(rng: np.random.Generator, repeats: int, trials: int = TRIALS) -> Overwrites:
    """Draw streams one by one, in the order in which the document draws them, so that its seed gives its streams."""
    columns: list[list[np.ndarray]] = [[], [], [], [], []]
    for _ in range(trials):
        keys = np.linalg.qr(rng.standard_normal((WIDTH, KEYS)))[0].T
        codebook = rng.standard_normal((VALUES, WIDTH))
        codebook /= np.linalg.norm(codebook, axis=1, keepdims=True)
        writes = [(key, rng.integers(VALUES)) for key in range(KEYS) for _ in range(repeats)]
        rng.shuffle(writes)
        where, what = np.array(writes).T
        latest = np.zeros(KEYS, dtype=np.int64)
        latest[where] = what  # NumPy keeps the last of several writes to one place.
        for column, row in zip(columns, (keys[where], codebook[what], keys, codebook, latest), strict=True):
            column.append(row)
    k, v, keys, codebook, latest = (torch.from_numpy(np.stack(column)) for column in columns)
    return Overwrites(k[:, :, None], v[:, :, None], keys, codebook, latest)


def run(settings: Settings) -> Result:
    """Write the same streams with the additive and with the delta rule."""
    rng = np.random.default_rng(0)
    hebbian, delta = [], []
    for repeats in REPEATS:
        task = draw_overwrites(rng, repeats)
        _, added = ops.linear_attention(task.k, task.k, task.v, output_final_state=True)
        beta = torch.ones(task.k.shape[:3], dtype=task.k.dtype)
        _, edited = ops.delta_rule(task.k, task.k, task.v, beta=beta, output_final_state=True)
        assert added is not None and edited is not None
        hebbian.append(task.recall(added))
        delta.append(task.recall(edited))
        settings.progress(repeats / REPEATS[-1])
    return {"repeats": list(REPEATS), "hebbian": hebbian, "delta": delta}


def check(result: Result) -> None:
    """The delta write recalls everything; the additive write recalls what the document measured."""
    for repeats, theirs, ours, delta in zip(REPEATS, HEBBIAN, result["hebbian"], result["delta"], strict=True):
        assert delta >= 1, f"the delta write recalls {delta:.4f} after {repeats} writes a key, wanted exactly 1"
        assert abs(ours - theirs) <= 0.03, f"additive recall is {ours:.3f} at {repeats} writes, printed {theirs}"


def tables(result: Result) -> list[Table]:
    """Recall by writes per key."""
    columns = ("writes per key", "Hebbian, PyTorch", "Hebbian, JAX", "Hebbian, ours", "delta, both", "delta, ours")
    numbers = zip(HEBBIAN, HEBBIAN, result["hebbian"], DELTA, result["delta"], strict=True)
    rows: list[tuple[str | int | float, ...]] = [
        (repeats, *(f"{number:.3f}" for number in row)) for repeats, row in zip(REPEATS, numbers, strict=True)
    ]
    note = (
        "The seed draws the document's streams. At two writes a key both values are equally near to the read: here "
        "such a tie counts one half; the document lets rounding choose."
    )
    return [Table("Recall of the latest value", columns, rows, note)]


def _draw(result: Result, axes: Axes) -> None:
    axes.plot(result["repeats"], result["delta"], "s-", color="C1", label="delta write")
    axes.plot(result["repeats"], result["hebbian"], "o-", color="C0", label="additive (Hebbian) write")
    axes.plot(REPEATS, HEBBIAN, "x", color="C3", markersize=9, label="additive, document")
    axes.axhline(1 / VALUES, color="C2", linestyle=":", label="chance")
    axes.set(xlabel="writes per key", ylabel="recall of the latest value", ylim=(0, 1.05), title="Binding a key anew")
    axes.set_xticks(REPEATS)
    axes.legend()


def figures(result: Result) -> list[Figure]:
    """Show recall over writes per key."""
    caption = "Orthonormal keys, so that no key disturbs another: staleness is the only effect in view."
    return [Figure("Addition cannot replace", caption, partial(_draw, result))]


EXPERIMENT = Experiment(
    name="B1",
    title="Memory that edits",
    claim="An additive memory cannot bind a key anew; the delta write does.",
    source="Dive into Deep Learning §12.5.1, The Trouble with Adding",
    setting=f"{KEYS} orthonormal keys in {WIDTH} dimensions, {VALUES} unit values, R shuffled writes a key, {TRIALS} "
    "streams, seed 0 and the document's order of draws; float64; nearest codebook entry.",
    band="Delta exactly 1; additive within 0.03 of the printed recall.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=0.7,
)
