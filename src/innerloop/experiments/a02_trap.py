"""A2: keep a point in its own estimate and the training loss falls to zero while nothing is learned."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from innerloop.experiments.a01_bandwidth import attention, descend, draw_data, training_loss
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EPOCHS = 500
HELD_OUT = 500


def run(settings: Settings) -> Result:
    """Sweep w with and without the diagonal, and descend on both losses."""
    x, y = (tensor.double() for tensor in draw_data())
    fresh_x, fresh_y = (tensor.double() for tensor in draw_data(seed=1, n=HELD_OUT))
    sweep = torch.logspace(-0.5, 3, 71, dtype=torch.float64)
    kept = [training_loss(w, x, y, leave_one_out=False).item() for w in sweep]
    left_out = [training_loss(w, x, y, leave_one_out=True).item() for w in sweep]
    settings.progress(0.5)

    def held_out(w: float) -> float:
        return ((attention(fresh_x, x, torch.tensor(w)) @ y - fresh_y) ** 2).mean().item()

    result: Result = {"w": sweep.tolist(), "kept": kept, "left_out": left_out}
    result["held_out"] = [held_out(w) for w in result["w"]]
    for name, leave_one_out in (("descent_kept", False), ("descent_left_out", True)):
        _, path = descend(x, y, EPOCHS, leave_one_out=leave_one_out)
        result[name] = {"w": [path[4], path[-1]], "held_out": [held_out(path[4]), held_out(path[-1])]}
    settings.progress(1.0)
    return result


def check(result: Result) -> None:
    """The training loss must vanish while the error on fresh points exceeds that of the learned bandwidth."""
    trained, held_out = result["kept"][-1], result["held_out"][-1]
    assert trained < 1e-6, f"the training loss is {trained:.1e} at w = {result['w'][-1]:.0f}, wanted < 1e-6"
    learned = result["descent_left_out"]["held_out"][0]
    assert held_out > learned, f"held-out error {held_out:.3f} at the zero loss, {learned:.3f} at A1's bandwidth"
    w = result["descent_kept"]["w"]
    assert w[1] > w[0] > 1, f"descent on the full loss should drive w up; it went from 1 to {w[0]:.2f} to {w[1]:.2f}"


def tables(result: Result) -> list[Table]:
    """Training loss beside held-out error at the two bandwidths, and where descent goes."""
    left_out, kept = result["descent_left_out"], result["descent_kept"]
    columns = ("what is minimised", "w after 5 epochs", f"w after {EPOCHS}", "held-out error at each")
    rows: list[tuple[str | int | float, ...]] = [
        (name, f"{path['w'][0]:.3f}", f"{path['w'][1]:.3f}", " and ".join(f"{e:.3f}" for e in path["held_out"]))
        for name, path in (("leave-one-out loss", left_out), ("loss with the point itself", kept))
    ]
    note = (
        f"At w = {result['w'][-1]:.0f} the training loss is {result['kept'][-1]:.1e} and the held-out error "
        f"{result['held_out'][-1]:.3f}. The document states the trap and prints no number."
    )
    return [Table("The same descent on two losses", columns, rows, note)]


def _draw(result: Result, axes: Axes) -> None:
    axes.semilogx(result["w"], result["kept"], color="C3", label="training, point kept")
    axes.semilogx(result["w"], result["left_out"], color="C0", label="training, leave one out")
    axes.semilogx(result["w"], result["held_out"], color="C2", label="held out")
    axes.axvline(result["descent_left_out"]["w"][0], color="C1", linestyle=":", label="w of A1")
    axes.set(xlabel="w", ylabel="mean squared error", title="Zero training loss, nothing learned", ylim=(0, 3.4))
    axes.legend(loc="upper right")


def figures(result: Result) -> list[Figure]:
    """Show the three errors over w."""
    caption = "With the point itself in its estimate the training loss falls to 0; the error on fresh points rises."
    return [Figure("The trap", caption, partial(_draw, result))]


EXPERIMENT = Experiment(
    name="A2",
    title="The trap of seeing one's own answer",
    claim="Without leave-one-out the training loss falls to 0 as w grows, and the estimator learns nothing.",
    source="Dive into Deep Learning §12.6, Learning at Test Time: the trap",
    setting=f"The data of A1 in float64 with the diagonal kept, w swept to 1,000; {HELD_OUT} fresh points of seed 1; "
    f"{EPOCHS} epochs of A1's descent on either loss.",
    band="Training loss below 1e-6 at the end of the sweep, and held-out error there above that of A1's bandwidth.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=0.6,
)
