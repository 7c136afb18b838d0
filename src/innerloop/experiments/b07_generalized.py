"""B7: RWKV-7's generalized delta rule becomes DeltaNet, or a diagonal decay, when its roles are tied."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from innerloop import ops, testing
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, LENGTH = 8, 64
DOCUMENT = "4.44e-16"
BAR = 1e-12
SETTINGS = {
    "delta": "no decay, removal key = write key, one rate: the delta rule",
    "gated": "scalar decay, the erase scaled by it: the gated delta rule",
    "diagonal": "nothing erased: a decay for each channel",
}


def stream_of(draw: dict[str, np.ndarray]) -> tuple[dict[str, Tensor], Tensor]:
    """Return the stream as ``[1, T, 1, .]`` tensors by name, and the memory that it starts from."""
    tokens = {name: torch.from_numpy(x)[None, :, None] for name, x in draw.items() if name != "state"}
    return tokens, torch.from_numpy(draw["state"])[None, None]


def final_states(draw: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Run the generalized rule over the stream under each of the three tyings."""
    x, start = stream_of(draw)
    k, beta, alpha = x["k"], x["beta"][..., None].expand_as(x["k"]), x["alpha"][..., None].expand_as(x["k"])
    none = torch.zeros_like(k)
    tied = {
        "delta": (beta * k, none, beta),
        "gated": (beta * k, alpha.log(), alpha * beta),
        "diagonal": (k, x["w"].log(), none),
    }
    return {
        name: state_of(ops.rwkv7(k, key, x["v"], g=g, a=a, kappa=k, initial_state=start, output_final_state=True))
        for name, (key, g, a) in tied.items()
    }


def layer_states(draw: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Run the same stream through the rules that the tyings should become."""
    x, start = stream_of(draw)
    k, v, beta = x["k"], x["v"], x["beta"]
    delta = ops.delta_rule(k, k, v, beta=beta, initial_state=start, output_final_state=True)
    gated = ops.gated_delta_rule(k, k, v, g=x["alpha"].log(), beta=beta, initial_state=start, output_final_state=True)
    diagonal = ops.gla(k, k, v, g=x["w"].log(), initial_state=start, output_final_state=True)
    return {"delta": state_of(delta), "gated": state_of(gated), "diagonal": state_of(diagonal)}


def state_of(result: tuple[Tensor, Tensor | None]) -> Tensor:
    """Return the state that a call was asked for."""
    assert result[1] is not None
    return result[1]


def draw_stream(seed: int = 0) -> dict[str, np.ndarray]:
    """Draw a full memory, unit keys, values, decays and write strengths."""
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((LENGTH, WIDTH))
    return {
        "state": rng.standard_normal((WIDTH, WIDTH)),
        "k": k / np.linalg.norm(k, axis=1, keepdims=True),
        "v": rng.standard_normal((LENGTH, WIDTH)),
        "w": rng.uniform(0.5, 1.0, (LENGTH, WIDTH)),
        "beta": rng.uniform(0.0, 1.0, LENGTH),
        "alpha": rng.uniform(0.5, 1.0, LENGTH),
    }


def single_step(draw: dict[str, np.ndarray]) -> float:
    """The document's own check: one step at rate 0.7, against the delta rule: largest absolute difference."""
    k, v, start = (torch.from_numpy(x)[None, None] for x in (draw["k"][0], draw["v"][0], draw["state"]))
    rate = torch.full((1, 1), 0.7, dtype=torch.float64)
    none = torch.zeros_like(k)
    _, general = ops.step("rwkv7", k, 0.7 * k, v, state=start, g=none, a=none + 0.7, kappa=k)
    _, delta = ops.step("delta_rule", k, k, v, beta=rate, state=start)
    return float((general - delta).abs().max())


def run(settings: Settings) -> Result:
    """Compare the three tyings with the layers that they should become."""
    draw = draw_stream()
    general, layers = final_states(draw), layer_states(draw)
    settings.progress(1.0)
    k, w, kappa = draw["k"][0], draw["w"][0], draw["k"][1]
    transitions = {
        "delta rule": np.eye(WIDTH) - 0.7 * np.outer(k, k),
        "diagonal decay": np.diag(w),
        "RWKV-7": np.diag(w) - np.outer(draw["w"][2] * kappa, kappa),
    }
    return {
        "single_step": single_step(draw),
        "stream": {name: testing.error(general[name], layers[name]) for name in SETTINGS},
        "transitions": {name: matrix.tolist() for name, matrix in transitions.items()},
    }


def check(result: Result) -> None:
    """One step and whole streams must agree to rounding."""
    step = result["single_step"]
    assert step < BAR, f"one step in the delta rule's setting is {step:.1e} from ops.delta_rule, wanted < {BAR:.0e}"
    for name, error in result["stream"].items():
        assert error < BAR, f"{SETTINGS[name]}: {error:.1e} apart after {LENGTH} tokens, wanted < {BAR:.0e}"


def tables(result: Result) -> list[Table]:
    """Deviation under each tying."""
    served = {"delta": "ops.delta_rule", "gated": "ops.gated_delta_rule", "diagonal": "ops.gla"}
    rows: list[tuple[str | int | float, ...]] = [
        ("one step of the first", "ops.delta_rule", DOCUMENT, DOCUMENT, f"{result['single_step']:.2e}")
    ]
    rows += [(said, served[name], "--", "--", f"{result['stream'][name]:.2e}") for name, said in SETTINGS.items()]
    note = f"One step: largest absolute difference, as in the document. Streams of {LENGTH} tokens: relative."
    return [Table("The generalized rule, tied", ("tying", "compared with", "PyTorch", "JAX", "ours"), rows, note)]


def _draw(result: Result, *panels: Axes) -> None:
    for axes, (name, matrix) in zip(panels, result["transitions"].items(), strict=True):
        image = axes.imshow(matrix, cmap="RdBu", vmin=-1, vmax=1, interpolation="nearest")
        axes.set(xlabel="channel before", ylabel="channel after", title=name)
        axes.figure.colorbar(image, ax=axes, fraction=0.046, pad=0.04)


def figures(result: Result) -> list[Figure]:
    """Show what each transition does to the memory's channels."""
    caption = "Transition matrices of width 8: identity plus rank one, diagonal, and RWKV-7's diagonal plus rank one."
    return [Figure("Three transitions", caption, partial(_draw, result), panels=3)]


EXPERIMENT = Experiment(
    name="B7",
    title="The generalized delta rule",
    claim="RWKV-7's update collapses to DeltaNet when its roles are tied, and to a diagonal decay without the erase.",
    source="Dive into Deep Learning §12.5.4.2, The Generalized Delta Rule",
    setting=f"Width {WIDTH}, float64, seed 0; `ops.rwkv7`, one step and {LENGTH} tokens, against `ops.delta_rule`, "
    "`ops.gated_delta_rule` and `ops.gla`.",
    band="Below 1e-12.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=0.1,
)
