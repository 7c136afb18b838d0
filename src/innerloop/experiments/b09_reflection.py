"""B9: at beta = 2 the delta rule's transition is a reflection and counts parity; at beta = 1 it is a projection."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from innerloop import ops
from innerloop.checks import Form
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 6
BETAS = (0.5, 1.0, 1.5, 2.0)
ALONG = ("+0.5", "-0.0", "-0.5", "-1.0")
WORDS = {8: 2000, 24: 2000, 64: 2000, 4096: 1000}
CHUNKED = 16
PROJECTION = {8: "0.529", 24: "0.518", 64: "0.501"}


def unit_key(generator: torch.Generator) -> Tensor:
    """Draw the one axis along which the cell flips."""
    k = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
    return k / k.norm()


def eigenvalues(k: Tensor) -> Tensor:
    """Read I - beta k k^T out of the op, one write of the value 0 onto the identity, and return its spectrum."""
    key = k.expand(len(BETAS), 1, -1)
    eye = torch.eye(WIDTH, dtype=k.dtype).expand(len(BETAS), 1, -1, -1)
    beta = torch.tensor(BETAS, dtype=k.dtype)[:, None]
    _, state = ops.step("delta_rule", key, key, torch.zeros_like(key), beta=beta, state=eye)
    return torch.linalg.eigvalsh(state[:, 0])


def follow(k: Tensor, bits: Tensor, beta: float, form: Form = "recurrent") -> Tensor:
    """Start at k, apply the transition on every one-bit, read along k; ``[B, T]``."""
    n, length = bits.shape
    key = k.expand(n, length, 1, WIDTH)
    value = torch.zeros(n, length, 1, 1, dtype=k.dtype)
    start = k[:, None].expand(n, 1, WIDTH, 1)
    strength = beta * bits[:, :, None].to(k.dtype)
    o, _ = ops.delta_rule(key, key, value, beta=strength, scale=1.0, initial_state=start, form=form)
    return o[:, :, 0, 0]


def told(reads: Tensor, bits: Tensor) -> float:
    """Share of words whose parity the sign of the last read tells."""
    return ((reads < 0).long() == bits.sum(1) % 2).double().mean().item()


def count_parity(k: Tensor, bits: Tensor) -> dict[str, float]:
    """Score both transitions on words ``[B, T]``, and how far the reflection's last read is from +-1 at worst."""
    projected, reflected = (follow(k, bits, beta)[:, -1] for beta in (1.0, 2.0))
    few = bits[:CHUNKED]
    chunked = follow(k, few, 2.0, form="chunk")[:, -1]
    return {
        "projection": told(projected, bits),
        "reflection": told(reflected, bits),
        "chunked": told(chunked, few),
        "off": (reflected.abs() - 1).abs().max().item(),
        "chunked_off": (chunked.abs() - 1).abs().max().item(),
    }


def run(settings: Settings) -> Result:
    """Read the spectrum, then track parity over short and long words with hand-set weights."""
    generator = torch.Generator().manual_seed(9)
    k = unit_key(generator)
    spectrum = eigenvalues(k)
    result: Result = {
        "along": spectrum[:, 0].tolist(),
        "elsewhere": spectrum[:, 1:].sub(1).abs().amax(-1).tolist(),
        "parity": {},
    }
    single = k.float()
    for length, count in WORDS.items():
        result["parity"][str(length)] = count_parity(single, torch.randint(2, (count, length), generator=generator))
        settings.progress(len(result["parity"]) / len(WORDS))
    word = torch.randint(2, (1, 24), generator=generator)
    result["word"] = word[0].tolist()
    result["reads"] = {str(beta): follow(single, word, beta)[0].tolist() for beta in (1.0, 2.0)}
    return result


def check(result: Result) -> None:
    """The spectrum to rounding; the reflection always right, the projection at chance."""
    for beta, along, elsewhere in zip(BETAS, result["along"], result["elsewhere"], strict=True):
        assert abs(along - (1 - beta)) < 1e-14, f"the eigenvalue along k is {along} at beta {beta}, wanted {1 - beta}"
        assert elsewhere < 1e-14, f"an eigenvalue across k is {elsewhere:.1e} from 1 at beta {beta}"
    assert set(result["parity"]) == {str(length) for length in WORDS}, f"lengths run: {list(result['parity'])}"
    for length, row in result["parity"].items():
        for form in ("reflection", "chunked"):
            assert row[form] >= 1, f"the reflection ({form}) tells {row[form]:.4f} of parities at T = {length}"
        chance = row["projection"]
        assert 0.45 <= chance <= 0.56, f"the projection tells {chance:.3f} of parities at T = {length}, wanted chance"


def tables(result: Result) -> list[Table]:
    """The spectrum, and parity by length."""
    spectrum: list[tuple[str | int | float, ...]] = [
        (f"{beta:.1f}", printed, f"{along:+.1f}", "+1.0", f"{1 + off:+.1f}")
        for beta, printed, along, off in zip(BETAS, ALONG, result["along"], result["elsewhere"], strict=True)
    ]
    parity: list[tuple[str | int | float, ...]] = []
    for length, count in WORDS.items():
        row, said = result["parity"][str(length)], PROJECTION.get(length, "--")
        reflected = "1.000" if length in PROJECTION else "--"
        ours = (f"{row['reflection']:.3f}", f"{row['chunked']:.3f}", f"{row['off']:.0e}", f"{row['chunked_off']:.0e}")
        parity.append((length, count, said, said, f"{row['projection']:.3f}", reflected, reflected, *ours))
    columns = (
        "T", "words", "beta 1, PyTorch", "JAX", "ours", "beta 2, PyTorch", "JAX", "ours", "ours in chunks",
        "read off +-1 by", "in chunks",
    )  # fmt: skip
    return [
        Table(
            "Eigenvalues of I - beta k k^T",
            ("beta", "along k, document", "ours", "elsewhere, document", "ours"),
            spectrum,
        ),
        Table(
            "Parity told by the sign of the last read",
            columns,
            parity,
            f"In chunks: the first {CHUNKED} words. After a projection nothing is left along k but rounding.",
        ),
    ]


def _draw(result: Result, spectrum: Axes, word: Axes) -> None:
    spectrum.plot((0, 2), (1, -1), color="C2", linestyle=":", label="1 - beta")
    spectrum.plot(BETAS, result["along"], "o", color="C0", label="along k, measured")
    spectrum.axhline(1.0, color="C1", linestyle="--", label="elsewhere")
    spectrum.set(xlabel="beta", ylabel="eigenvalue", title="One eigenvalue moves")
    spectrum.legend()
    tokens = range(1, len(result["word"]) + 1)
    for beta, name, color in (("2.0", "beta = 2, reflection", "C0"), ("1.0", "beta = 1, projection", "C1")):
        word.step(tokens, result["reads"][beta], where="mid", color=color, label=name)
    ones = [t for t, bit in zip(tokens, result["word"], strict=True) if bit]
    word.plot(ones, [-1.35] * len(ones), "|", color="C3", markersize=8, label="a one-bit")
    word.set(xlabel="token", ylabel="read along k", title="A word of 24 bits", ylim=(-1.6, 3.0))
    word.legend(loc="upper right")


def figures(result: Result) -> list[Figure]:
    """Show the spectrum and one word."""
    caption = "First the spectrum; then the reflection, which flips on every one-bit, and the projection, which dies."
    return [Figure("A reflection counts", caption, partial(_draw, result), panels=2)]


EXPERIMENT = Experiment(
    name="B9",
    title="The reflection in the delta rule",
    claim="I - beta k k^T has eigenvalue 1 - beta along k: beta = 2 is an exact reflection and computes parity at any "
    "length, beta = 1 a projection at chance.",
    source="Dive into Deep Learning §12.5.5.1, The Reflection in the Delta Rule",
    setting="Weights set by hand, width 6, seed 9: state k at the start, `ops.delta_rule` with v = 0 and beta on "
    "one-bits, read along k. Spectrum in float64; parity in float32 on 2,000 words of 8, 24 and 64 bits and "
    f"1,000 of 4,096, token by token, the first {CHUNKED} in chunks too.",
    band="Eigenvalues to rounding; reflection exactly 1 at every length; projection within 0.45 to 0.56.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=2.7,
)
