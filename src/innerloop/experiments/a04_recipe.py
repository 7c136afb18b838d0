"""A4: one recipe, six rows: every published layer is a setting of weights, class and solver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from innerloop import ops, testing
from innerloop.experiments.experiment import Experiment, Figure, Result, Settings, Table
from innerloop.recipe import (
    MLP,
    ChannelDecay,
    CrossMoment,
    Exact,
    GradientStep,
    ImplicitStep,
    KernelSmoother,
    LinearMap,
    QueryKernel,
    Recipe,
    ScalarDecay,
    Uniform,
)

LENGTH, WIDTH = 24, 6
RIDGE = 0.5
BAR = 1e-9


@dataclass(frozen=True)
class Stream:
    """One float64 sequence and every gate that a row may want; axes ``[1, T, 1, K]`` and ``[1, T, 1]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    g_channel: Tensor
    beta: Tensor
    eta: Tensor
    alpha: Tensor

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values."""
        return self.q, self.k, self.v


@dataclass(frozen=True)
class Row:
    """One row of the document's table, as a recipe, an independent truth and the op that serves it."""

    model: str
    said: str
    """The document's words for weights, class and solver."""
    recipe: Recipe
    truth: str
    """What the recipe is compared with, in words."""
    expected: Tensor
    gates: dict[str, Tensor] = field(default_factory=dict)
    op: str = ""
    got: Tensor | None = None
    """What the op read; None where the library has no op for the row yet."""
    start: tuple[Tensor, ...] = ()
    """The first parameters of a memory that does not start empty."""


def draw_stream(seed: int = 4) -> Stream:
    """Draw a sequence with unit keys and gates that stay away from 0."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, LENGTH, 1, *shape, generator=generator, dtype=torch.float64)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        draw = torch.rand(1, LENGTH, 1, *shape, generator=generator, dtype=torch.float64)
        return low + (high - low) * draw

    q, k, v = normal(WIDTH), normal(WIDTH), normal(WIDTH)
    return Stream(
        q=q,
        k=k / k.norm(dim=-1, keepdim=True),
        v=v,
        g=-uniform(0.05, 0.7),
        g_channel=-uniform(0.05, 0.7, WIDTH),
        beta=uniform(0.1, 1.0),
        eta=uniform(0.1, 0.9),
        alpha=uniform(0.01, 0.3),
    )


def weighted_mean(stream: Stream) -> Tensor:
    """Average the past values by the exponential of q·k: the Nadaraya-Watson estimator, in numpy."""
    q, k, v = (x[0, :, 0].numpy() for x in stream.qkv)
    rows = []
    for t in range(LENGTH):
        weight = np.exp(k[: t + 1] @ q[t])
        rows.append((weight[:, None] * v[: t + 1]).sum(0) / weight.sum())
    return torch.from_numpy(np.stack(rows))[None, :, None]


def without_covariance(stream: Stream, keep: np.ndarray) -> Tensor:
    """Solve the least squares, weighted by ``keep`` ``[T, K]``, by brute force; multiply its covariance back in."""
    q, k, v = (x[0, :, 0].numpy() for x in stream.qkv)
    rows = []
    for t in range(LENGTH):
        # A pair counts by what all later tokens keep of it, channel by channel.
        since = np.stack([np.prod(keep[i + 1 : t + 1], axis=0) for i in range(t + 1)])  # [t + 1, K]
        if (since == since[:, :1]).all():
            root = np.sqrt(since[:, :1])
            fit = np.linalg.lstsq(root * k[: t + 1], root * v[: t + 1], rcond=None)[0]
            state = (since * k[: t + 1]).T @ k[: t + 1] @ fit
        else:
            state = (since * k[: t + 1]).T @ v[: t + 1]  # Channels that fade apart weigh no common objective.
        rows.append(q[t] @ state)
    return torch.from_numpy(np.stack(rows))[None, :, None]


def descent(stream: Stream, *, model: Callable, start: tuple[Tensor, ...], rate: Tensor, **gates: Tensor) -> Tensor:
    """Take the stated step at every token, the gradient of half the squared error by autograd."""
    parameters, velocity = start, tuple(torch.zeros_like(p) for p in start)
    rows = []
    for t in range(LENGTH):
        q, k, v = (x[0, t, 0] for x in stream.qkv)
        eta, alpha, g = (gates[name][0, t, 0] if name in gates else torch.zeros(()) for name in ("eta", "alpha", "g"))
        parameters = tuple((g.exp() * p).requires_grad_() for p in parameters)
        loss = 0.5 * ((model(parameters, k) - v) ** 2).sum()
        slopes = torch.autograd.grad(loss, parameters)
        velocity = tuple(eta * u - rate[0, t, 0] * slope for u, slope in zip(velocity, slopes, strict=True))
        parameters = tuple(((1 - alpha) * p + u).detach() for p, u in zip(parameters, velocity, strict=True))
        rows.append(model(parameters, q))
    return torch.stack(rows)[None, :, None]


def proximal(stream: Stream) -> Tensor:
    """Minimise |s - s'|² + beta |s·k - v|² at every token by a linear solve, in numpy."""
    q, k, v = (x[0, :, 0].numpy() for x in stream.qkv)
    state, rows = np.zeros((WIDTH, WIDTH)), []
    for t in range(LENGTH):
        beta = stream.beta[0, t, 0].item()
        state = np.linalg.solve(np.eye(WIDTH) + beta * np.outer(k[t], k[t]), state + beta * np.outer(k[t], v[t]))
        rows.append(q[t] @ state)
    return torch.from_numpy(np.stack(rows))[None, :, None]


def matrix(parameters: tuple[Tensor, ...], x: Tensor) -> Tensor:
    """Evaluate a linear memory."""
    return x @ parameters[0]


def network(parameters: tuple[Tensor, ...], x: Tensor) -> Tensor:
    """Evaluate a memory of two layers."""
    return torch.nn.functional.gelu(x @ parameters[0]) @ parameters[1]


def attention_rows(stream: Stream) -> list[Row]:
    """The row that keeps every pair, and the rows that drop the covariance."""
    keep = torch.exp(stream.g)[0, :, 0, None].expand(-1, WIDTH).numpy()
    slow = torch.full_like(stream.g, float(np.log(1 - 2**-5)))
    retained = slow.exp()[0, :, 0, None].expand(-1, WIDTH).numpy()
    said = "geometric decay; linear; weighted LS shortcut"
    deleted = "least squares at every token, its covariance multiplied back"
    return [
        Row("softmax attention", "query kernel; nonparametric; exact",
            Recipe(QueryKernel(), KernelSmoother(), Exact()), "weighted mean of the past", weighted_mean(stream),
            op="softmax_attention", got=ops.softmax_attention(*stream.qkv, scale=1.0)[0]),
        Row("linear attention", "uniform; linear; LS minus the inverse covariance",
            Recipe(Uniform(), LinearMap(), CrossMoment()), deleted,
            without_covariance(stream, np.ones((LENGTH, WIDTH))),
            op="linear_attention", got=ops.linear_attention(*stream.qkv, scale=1.0)[0]),
        Row("RetNet", said, Recipe(ScalarDecay(), LinearMap(), CrossMoment()), deleted,
            without_covariance(stream, retained), gates={"weights.g": slow},
            op="retention", got=ops.retention(*stream.qkv, scale=1.0)[0]),
        Row("Mamba-2", said, Recipe(ScalarDecay(), LinearMap(), CrossMoment()), deleted,
            without_covariance(stream, keep), gates={"weights.g": stream.g},
            op="mamba2", got=ops.mamba2(*stream.qkv, g=stream.g, scale=1.0)[0]),
        Row("GLA", said, Recipe(ChannelDecay(), LinearMap(), CrossMoment()), "sum of the faded pairs",
            without_covariance(stream, stream.g_channel.exp()[0, :, 0].numpy()),
            gates={"weights.g": stream.g_channel},
            op="gla", got=ops.gla(*stream.qkv, g=stream.g_channel, scale=1.0)[0]),
    ]  # fmt: skip


def step_rows(stream: Stream) -> list[Row]:
    """The rows that take one step a token on a linear memory."""
    empty = (torch.zeros(WIDTH, WIDTH, dtype=torch.float64),)
    theta, eta, alpha = stream.beta, stream.eta, stream.alpha
    momentum = Recipe(Uniform(), LinearMap(), GradientStep(rate=None, momentum=None, decay=None))
    return [
        Row("DeltaNet", "uniform, gated; linear; one explicit SGD step",
            Recipe(Uniform(), LinearMap(), GradientStep(rate=None)), "the stated step by autograd",
            descent(stream, model=matrix, start=empty, rate=stream.beta), gates={"solver.rate": stream.beta},
            op="delta_rule", got=ops.delta_rule(*stream.qkv, beta=stream.beta, scale=1.0)[0]),
        Row("DeltaNet, gated", "uniform, gated; linear; one explicit SGD step",
            Recipe(ScalarDecay(), LinearMap(), GradientStep(rate=None)), "the stated step by autograd",
            descent(stream, model=matrix, start=empty, rate=stream.beta, g=stream.g),
            gates={"solver.rate": stream.beta, "weights.g": stream.g},
            op="gated_delta_rule", got=ops.gated_delta_rule(*stream.qkv, g=stream.g, beta=stream.beta, scale=1.0)[0]),
        Row("Longhorn", "uniform, gated; linear; one implicit step",
            Recipe(Uniform(), LinearMap(), ImplicitStep(strength=None)), "argmin at every token by a linear solve",
            proximal(stream), gates={"solver.strength": stream.beta},
            op="longhorn", got=ops.longhorn(*stream.qkv, beta=stream.beta, scale=1.0)[0]),
        Row("Titans, linear memory", "weight decay; deep MLP; SGD + momentum", momentum, "the stated step by autograd",
            descent(stream, model=matrix, start=empty, rate=theta, eta=eta, alpha=alpha),
            gates={"solver.rate": theta, "solver.momentum": eta, "solver.decay": alpha},
            op="momentum_delta_rule",
            got=ops.momentum_delta_rule(*stream.qkv, theta=theta, eta=eta, alpha=alpha)[0]),
    ]  # fmt: skip


def other_rows(stream: Stream) -> list[Row]:
    """The deep memory, and the regression solved exactly, which the document's table only approximates."""
    generator = torch.Generator().manual_seed(40)
    deep = tuple(0.5 * torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((6, 12), (12, 6)))
    theta = 0.1 * stream.beta
    exact = Recipe(ScalarDecay(), LinearMap(), Exact(ridge=RIDGE))
    return [
        Row("Titans", "weight decay; deep MLP; SGD + momentum",
            Recipe(Uniform(), MLP((6, 12, 6), bias=False), GradientStep(rate=None, momentum=None, decay=None)),
            "the stated step by autograd",
            descent(stream, model=network, start=deep, rate=theta, eta=stream.eta, alpha=stream.alpha),
            gates={"solver.rate": theta, "solver.momentum": stream.eta, "solver.decay": stream.alpha},
            start=tuple(p[None, None] for p in deep), op="titans",
            got=ops.titans(*stream.qkv, theta=theta, eta=stream.eta, alpha=stream.alpha,
                           weights=tuple(p[None] for p in deep), mini_batch=1)[0]),
        Row("the regression itself", "not in the table", exact, "fit_all: the pseudo-inverse at every token",
            exact.fit_all(*stream.qkv, gates={"weights.g": stream.g}), gates={"weights.g": stream.g},
            op="recursive_least_squares",
            got=ops.recursive_least_squares(*stream.qkv, g=stream.g, ridge=RIDGE)[0]),
    ]  # fmt: skip


def execute(row: Row, stream: Stream) -> dict[str, str | float | None]:
    """Run a row's recipe, and its op, against its truth."""
    state = row.recipe.start(parameters=row.start) if row.start else None
    read, _ = row.recipe.run(*stream.qkv, gates=row.gates, state=state)
    weights, memory, solver = row.recipe.describe()
    return {
        "model": row.model, "said": row.said, "weights": weights, "memory": memory, "solver": solver,
        "truth": row.truth, "recipe_error": testing.error(read, row.expected), "op": row.op,
        "op_error": None if row.got is None else testing.error(row.got, row.expected),
    }  # fmt: skip


def run(settings: Settings) -> Result:
    """Execute every row."""
    stream = draw_stream()
    rows = [*attention_rows(stream), *step_rows(stream), *other_rows(stream)]
    smoother = next(row for row in rows if row.op == "softmax_attention")
    results = []
    for row in rows:
        results.append(execute(row, stream))
        settings.progress(len(results) / len(rows))
    return {"rows": results, "fit_all": testing.error(smoother.recipe.fit_all(*stream.qkv), smoother.expected)}


def check(result: Result) -> None:
    """Every recipe and every op must meet its row's truth."""
    six = {"softmax attention", "linear attention", "Mamba-2", "DeltaNet", "Longhorn", "Titans"}
    missing = six - {row["model"] for row in result["rows"]}
    assert not missing, f"{len(missing)} of the document's six rows are missing: {sorted(missing)}"
    for row in result["rows"]:
        error = row["recipe_error"]
        assert error <= BAR, f"the recipe of {row['model']} is {error:.1e} from {row['truth']}, wanted <= {BAR:.0e}"
        if row["op"]:
            error = row["op_error"]
            assert error <= BAR, f"ops.{row['op']} is {error:.1e} from {row['truth']}, wanted <= {BAR:.0e}"
    assert result["fit_all"] <= BAR, f"fit_all of softmax attention is {result['fit_all']:.1e} from the weighted mean"


def tables(result: Result) -> list[Table]:
    """The document's table, executed."""
    rows: list[tuple[str | int | float, ...]] = [
        (
            row["model"], row["said"], f"{row['weights']}; {row['memory']}; {row['solver']}", row["truth"],
            f"{row['recipe_error']:.1e}", f"{row['op_error']:.1e} ({row['op']})" if row["op"] else "no op yet",
        )
        for row in result["rows"]
    ]  # fmt: skip
    columns = ("model", "the document's row", "our recipe, described by itself", "truth", "recipe errs", "op errs")
    return [Table("One recipe, executed", columns, rows, "Errors are relative to the truth's largest entry, float64.")]


def figures(result: Result) -> list[Figure]:
    """The table is the result."""
    return []


EXPERIMENT = Experiment(
    name="A4",
    title="One recipe",
    claim="Every layer is m_t = argmin of a weighted squared error with o = m(q): six published rows are settings of "
    "weights, class and solver.",
    source="Dive into Deep Learning §12.6, Learning at Test Time: one recipe; the reveal",
    setting=f"One float64 stream of {LENGTH} tokens, width {WIDTH}, seed 4. Each row's recipe is run by autograd and "
    "compared with an independent solution of its stated objective, and with the op.",
    band="At most 1e-9 relative for every recipe and every op.",
    run=run,
    check=check,
    tables=tables,
    figures=figures,
    seconds=0.4,
)
