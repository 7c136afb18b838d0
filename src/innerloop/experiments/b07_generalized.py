"""B7: RWKV-7's generalized delta rule becomes DeltaNet, or a diagonal decay, when its roles are tied."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from innerloop import ops
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table
from innerloop.recipe import ChannelDecay, CrossMoment, LinearMap, Recipe

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


def rwkv7_step(
    state: np.ndarray, w: np.ndarray, kappa: np.ndarray, a: np.ndarray, k: np.ndarray, v: np.ndarray
) -> np.ndarray:
    """Fade each channel by w, erase along kappa at rates a from the undecayed state, write k v^T."""
    # Peng et al. (2025), arXiv:2503.14456; their state is V by K, ours K by V.
    return w[:, None] * state - np.outer(a * kappa, kappa @ state) + np.outer(k, v)


def final_states(draw: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run the generalized step over the stream under each of the three tyings."""
    ones = np.ones(WIDTH)
    states = {name: draw["state"] for name in SETTINGS}
    for t in range(LENGTH):
        k, v, w, beta, alpha = (draw[name][t] for name in ("k", "v", "w", "beta", "alpha"))
        states["delta"] = rwkv7_step(states["delta"], ones, k, beta * ones, beta * k, v)
        states["gated"] = rwkv7_step(states["gated"], alpha * ones, k, alpha * beta * ones, beta * k, v)
        states["diagonal"] = rwkv7_step(states["diagonal"], w, k, 0 * ones, k, v)
    return states


def layer_states(draw: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run the same stream through the ops, and through the recipe of a channel decay."""
    k, v, w, beta, alpha = (torch.from_numpy(draw[name])[None, :, None] for name in ("k", "v", "w", "beta", "alpha"))
    start = torch.from_numpy(draw["state"])[None, None]
    _, delta = ops.delta_rule(k, k, v, beta=beta, initial_state=start, output_final_state=True)
    _, gated = ops.gated_delta_rule(
        k, k, v, g=alpha.log(), beta=beta, initial_state=start, output_final_state=True
    )
    recipe = Recipe(ChannelDecay(), LinearMap(), CrossMoment())
    _, diagonal = recipe.run(k, k, v, gates={"weights.g": w.log()}, state=recipe.start(parameters=(start,)))
    assert delta is not None and gated is not None
    found = {"delta": delta, "gated": gated, "diagonal": diagonal.parameters[0]}
    return {name: state[0, 0].numpy() for name, state in found.items()}


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
    """The document's own check: one step at rate 0.7, against the op: largest absolute difference."""
    k, v, ones = draw["k"][0], draw["v"][0], np.ones(WIDTH)
    ours = rwkv7_step(draw["state"], ones, k, 0.7 * ones, 0.7 * k, v)
    key, value, start = (torch.from_numpy(x)[None, None] for x in (k, v, draw["state"]))
    rate = torch.full((1, 1), 0.7, dtype=torch.float64)
    _, state = ops.step("delta_rule", key, key, value, beta=rate, state=start)
    return float(np.abs(ours - state[0, 0].numpy()).max())


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
        "stream": {n: float(np.abs(general[n] - layers[n]).max() / np.abs(layers[n]).max()) for n in SETTINGS},
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
    served = {"delta": "ops.delta_rule", "gated": "ops.gated_delta_rule", "diagonal": "the recipe of a channel decay"}
    rows: list[tuple[str | int | float, ...]] = [
        ("one step of the first", "ops.delta_rule", DOCUMENT, DOCUMENT, f"{result['single_step']:.2e}")
    ]
    rows += [
        (said, served[name], "--", "--", f"{result['stream'][name]:.2e}") for name, said in SETTINGS.items()
    ]
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
    setting=f"Width {WIDTH}, float64, seed 0; the step written from the paper's equation (arXiv:2503.14456), one step "
    f"and {LENGTH} tokens, against `ops.delta_rule`, `ops.gated_delta_rule` and the recipe of a channel decay.",
    band="Below 1e-12.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=0.1,
)
