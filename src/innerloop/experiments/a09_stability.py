"""A9: the implicit step is stable at any write strength, and at infinite strength it overwrites exactly."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from innerloop import ops, testing
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

WIDTH = 8
STRENGTHS = (0.0, *(10.0**power for power in range(-3, 13)), torch.inf)
STREAM = 256


def transition(beta: Tensor, k: Tensor) -> Tensor:
    """Read the matrix I - Delta k k^T out of the op: one write of the value 0 onto the identity, a row a strength."""
    key = k.expand(len(beta), 1, -1)
    eye = torch.eye(len(k), dtype=k.dtype).expand(len(beta), 1, -1, -1)
    _, state = ops.step("longhorn", key, key, torch.zeros_like(key), beta=beta[:, None], state=eye)
    return state[:, 0]


def largest_growth(generator: torch.Generator) -> float:
    """Erase with random keys at strengths up to 1e12 and infinity; return the memory's largest growth in one token."""
    k = torch.randn(1, STREAM, 1, WIDTH, generator=generator, dtype=torch.float64).expand(WIDTH, -1, -1, -1)
    beta = 10 ** (15 * torch.rand(1, STREAM, 1, generator=generator, dtype=torch.float64) - 3)
    beta = torch.where(torch.arange(STREAM)[:, None] % 7 == 6, torch.inf, beta).expand(WIDTH, -1, -1)
    start = torch.eye(WIDTH, dtype=torch.float64)
    # Row b of the batch asks every token with basis vector b: its answer is row b of the memory after that token.
    q = start[:, None, None, :].expand(-1, STREAM, -1, -1)
    full = start.expand(WIDTH, 1, -1, -1)
    rows, _ = ops.longhorn(q, k, torch.zeros_like(k), beta=beta, scale=1.0, initial_state=full)
    memory = torch.cat([start[None], rows[:, :, 0].transpose(0, 1)])
    return torch.linalg.matrix_norm(memory, ord=2).diff().max().item()


def recall_errors(generator: torch.Generator) -> dict[str, float]:
    """Write once with infinite strength onto a full memory and read the key back; relative error by dtype."""
    errors = {}
    for dtype in (torch.float64, torch.float32):
        k, v = (torch.randn(256, 1, 1, WIDTH, generator=generator, dtype=dtype) for _ in range(2))
        state = torch.randn(256, 1, WIDTH, WIDTH, generator=generator, dtype=dtype)
        beta = torch.full((256, 1, 1), torch.inf, dtype=dtype)
        o, _ = ops.longhorn(k, k, v, beta=beta, scale=1.0, initial_state=state)
        errors[str(dtype).removeprefix("torch.")] = testing.error(o, v)
    return errors


def run(settings: Settings) -> Result:
    """Sweep the strength, stream random writes, and recall after an infinite one."""
    generator = torch.Generator().manual_seed(9)
    k = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
    size = k.square().sum().item()
    beta = torch.tensor(STRENGTHS, dtype=torch.float64)
    matrices, along_k = transition(beta, k), torch.outer(k, k) / size
    kept = torch.einsum("bkl,kl->b", matrices, along_k)
    rest = matrices - kept[:, None, None] * along_k - (torch.eye(WIDTH, dtype=k.dtype) - along_k)
    result: Result = {
        "size": size,
        "beta": [str(b) for b in STRENGTHS],
        "along": kept.tolist(),
        "elsewhere": rest.abs().amax((1, 2)).tolist(),
        "growth": largest_growth(generator),
        "recall": recall_errors(generator),
    }
    settings.progress(1.0)
    return result


def check(result: Result) -> None:
    """Every transition must contract along the key by 1 / (1 + beta k·k) and keep the rest; recall must be exact."""
    for beta, along, elsewhere in zip(map(float, result["beta"]), result["along"], result["elsewhere"], strict=True):
        wanted = 1 / (1 + beta * result["size"])
        assert -1e-15 <= along <= 1 + 1e-15, f"at beta {beta:g} the share kept along k is {along}, outside [0, 1]"
        assert abs(along - wanted) < 1e-14, f"at beta {beta:g} the share kept along k is {along}, wanted {wanted}"
        assert elsewhere < 1e-14, f"at beta {beta:g} what lies across k changes by {elsewhere:.1e}"
    assert result["growth"] <= 1e-14, f"one erasure made the memory's norm grow by {result['growth']:.1e}"
    for dtype, bound in (("float64", 1e-14), ("float32", 2e-6)):
        error = result["recall"][dtype]
        assert error < bound, f"recall after an infinite write errs by {error:.1e} in {dtype}, wanted < {bound:.0e}"


def tables(result: Result) -> list[Table]:
    """What remains along the key, by strength."""
    size = result["size"]
    rows: list[tuple[str | int | float, ...]] = [
        (f"{float(beta):g}", f"{along:.6g}", f"{1 / (1 + float(beta) * size):.6g}", f"{1 - float(beta) * size:.6g}")
        for beta, along in zip(result["beta"], result["along"], strict=True)
    ]
    note = (
        f"k·k = {size:.3f}. {STREAM} random erasures at strengths up to 1e12 and infinity: the norm grows "
        f"by {result['growth']:.1e} at most. Recall after one infinite write: {result['recall']['float64']:.1e} "
        f"(float64), {result['recall']['float32']:.1e} (float32). The document states it and prints no number."
    )
    columns = ("beta", "kept along k, measured", "1 / (1 + beta k·k)", "explicit step: 1 - beta k·k")
    return [Table("Stable at every strength", columns, rows, note)]


def _draw(result: Result, axes: Axes) -> None:
    finite = [i for i, beta in enumerate(result["beta"]) if 0 < float(beta) < torch.inf]
    beta = [float(result["beta"][i]) for i in finite]
    axes.loglog(beta, [result["along"][i] for i in finite], "o-", color="C0", label="implicit, measured")
    axes.loglog(beta, [abs(1 - b * result["size"]) for b in beta], color="C3", label="explicit, |1 - beta k·k|")
    axes.axhline(1.0, color="C2", linestyle="--", label="above: it explodes")
    axes.set(xlabel="beta", ylabel="factor along the key", title="One write's effect on what was there")
    axes.legend(loc="lower left")


def figures(result: Result) -> list[Figure]:
    """Show the factor along the key for both steps."""
    caption = "The implicit step shrinks what is stored along the key; an explicit step of that strength explodes."
    return [Figure("Stable at every strength", caption, partial(_draw, result))]


EXPERIMENT = Experiment(
    name="A9",
    title="The implicit step never explodes",
    claim="With Delta = beta / (1 + beta k·k), Delta k·k < 1 for every beta >= 0; as beta grows to infinity the write "
    "overwrites exactly.",
    source="Dive into Deep Learning §12.6, Learning at Test Time: Longhorn, the gate derived",
    setting="float64, one key of width 8, beta 0, 1e-3 to 1e12 and infinity; transitions read out of `ops.longhorn`; "
    f"{STREAM} random erasures; 256 infinite writes onto full memories. Seed 9.",
    band="Share kept along k = 1 / (1 + beta k·k) within 1e-14, never outside [0, 1]; recall exact to rounding.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=0.1,
)
