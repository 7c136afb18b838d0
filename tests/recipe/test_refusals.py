"""What a recipe refuses, at construction and when it is run: one line that says what was wanted."""

import math

import pytest
import torch

from innerloop.recipe import (
    MLP,
    ChannelDecay,
    ConjugateGradients,
    CrossMoment,
    Exact,
    FeatureMap,
    GradientStep,
    ImplicitStep,
    KernelSmoother,
    LinearMap,
    QueryKernel,
    Recipe,
    ScalarDecay,
    Uniform,
    WeightedDecay,
    Window,
    dot,
)

B, T, G, K, V = 2, 8, 2, 3, 2


def inputs():
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(B, T, G, width, dtype=torch.float64, generator=generator) for width in (K, K, V))


def refusals():
    return {
        "weights and memory swapped": (lambda: Recipe(LinearMap(), Uniform(), Exact()), "order is Recipe"),
        "a class, not an instance": (lambda: Recipe(Uniform, LinearMap(), Exact()), "weights must be an instance"),
        "smoother of no kernel": (lambda: Recipe(Uniform(), KernelSmoother(), Exact()), "needs weights QueryKernel"),
        "smoother by a step": (lambda: Recipe(QueryKernel(), KernelSmoother(), GradientStep()), "solver Exact"),
        "kernel by a step": (lambda: Recipe(QueryKernel(), LinearMap(), GradientStep()), "a solver that refits"),
        "channels of an MLP": (lambda: Recipe(ChannelDecay(), MLP((2, 2)), GradientStep()), "LinearMap"),
        "weighted pairs and a step": (
            lambda: Recipe(WeightedDecay(g=0.0), LinearMap(), GradientStep()),
            "needs a solver that refits",
        ),
        "channels and a refit": (lambda: Recipe(ChannelDecay(), LinearMap(), Exact()), "Use ScalarDecay"),
        "MLP solved exactly": (lambda: Recipe(Uniform(), MLP((2, 2)), Exact()), "linear in its parameters"),
        "MLP by moments": (lambda: Recipe(Uniform(), MLP((2, 2)), CrossMoment()), "linear in its parameters"),
        "MLP by iterations": (lambda: Recipe(Uniform(), MLP((2, 2)), ConjugateGradients()), "linear in its parameters"),
        "a memory that grows": (lambda: ScalarDecay(g=0.1), r"g must be a number in \[-inf, 0\]; got 0.1"),
        "a negative weight": (lambda: WeightedDecay(weight=-1.0), "weight must be a number in"),
        "a decay that is text": (lambda: ChannelDecay(g="x"), "g must be a number"),
        "an empty window": (lambda: Window(0), "size must be a whole number"),
        "no kernel": (lambda: QueryKernel(None), "kernel must be a function"),
        "no features": (lambda: FeatureMap(None), "phi must be a function"),
        "one width": (lambda: MLP((3,)), "widths must be at least two"),
        "an unknown activation": (lambda: MLP((3, 3), activation="sin"), "must be one of gelu"),
        "half a step": (lambda: GradientStep(steps=0.5), "steps must be a whole number"),
        "a decay above 1": (lambda: GradientStep(decay=1.5), r"decay must be a number in \[0, 1\]"),
        "no loss": (lambda: GradientStep(loss="l2"), "loss must be a function"),
        "a negative strength": (lambda: ImplicitStep(-1.0), r"strength must be a number in \[0, inf\]"),
        "a strength that is NaN": (lambda: ImplicitStep(math.nan), "strength must be a number"),
        "a negative ridge": (lambda: Exact(-1.0), "ridge must be a number"),
        "conjugate gradients of no ridge": (lambda: ConjugateGradients(ridge=0.0), "Use Exact"),
        "no iterations": (lambda: ConjugateGradients(iterations=0), "iterations must be a whole number"),
    }


@pytest.mark.parametrize("case", refusals())
def test_what_makes_no_sense_fails_at_construction(case):
    build, message = refusals()[case]
    with pytest.raises(ValueError, match=message) as error:
        build()
    assert "\n" not in str(error.value)


def wrong_calls():
    q, k, v = inputs()
    delta = Recipe(Uniform(), LinearMap(), GradientStep())
    faded = Recipe(ScalarDecay(), LinearMap(), CrossMoment())
    deep = Recipe(Uniform(), MLP((K, 4, V)), GradientStep())
    rate = torch.ones(B, T, G, dtype=torch.float64)
    return {
        "an unknown gate": (lambda: delta.run(q, k, v, gates={"rate": rate}), "solver.rate, solver.momentum"),
        "a gate where there are none": (
            lambda: Recipe(Uniform(), LinearMap(), CrossMoment()).run(q, k, v, gates={"weights.g": rate}),
            r"\(none\)",
        ),
        "a missing gate": (lambda: faded.run(q, k, v), "weights.g must have a value"),
        "a gate of another shape": (
            lambda: delta.run(q, k, v, gates={"solver.rate": rate[..., None]}),
            r"solver.rate must have shape \[2, 8, 2\]; got \[2, 8, 2, 1\]",
        ),
        "a channel gate without channels": (
            lambda: Recipe(ChannelDecay(), LinearMap(), CrossMoment()).run(q, k, v, gates={"weights.g": -rate}),
            r"weights.g must have shape \[2, 8, 2, 3\]",
        ),
        "an MLP from nothing": (lambda: deep.run(q, k, v), "needs starting parameters"),
        "an MLP of other widths": (
            lambda: Recipe(Uniform(), MLP((K + 1, V)), GradientStep()).run(q, k, v),
            "must have widths 4 and 2; got 3 and 2",
        ),
        "a start of other shapes": (lambda: deep.start(parameters=(rate,)), "parameters of MLP"),
        "a start for a solver that refits": (
            lambda: Recipe(Uniform(), LinearMap(), Exact()).start(parameters=(rate,)),
            "fits the past alone",
        ),
        "a start of too few axes": (lambda: delta.start(parameters=(rate,)), r"one tensor \[B, G, K, V\]"),
        "keys of another width": (lambda: delta.run(q, k[..., :2], v), "q and k must have one width"),
        "values of another length": (lambda: delta.run(q, k, v[:, :3]), "v must have shape"),
        "a token that is a sequence": (lambda: delta.step(q, k, v), r"q must have shape \[B, G, K\]"),
        "no optimum to fit": (lambda: delta.fit_all(q, k, v), "seeks the optimum"),
        "no optimum of an MLP": (lambda: deep.fit_all(q, k, v), "seeks the optimum"),
        "weights below zero": (
            lambda: Recipe(QueryKernel(dot), LinearMap(), Exact()).fit_all(q, k, v),
            "weights of at least 0",
        ),
    }


@pytest.mark.parametrize("case", wrong_calls())
def test_a_wrong_call_says_what_was_wanted(case):
    call, message = wrong_calls()[case]
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_other_dtypes_are_refused():
    q, k, v = inputs()
    recipe = Recipe(Uniform(), LinearMap(), GradientStep())
    for bad in ((q.half(), k.half(), v.half()), (q, k.float(), v), (q.numpy(), k, v)):
        with pytest.raises(TypeError, match="must"):
            recipe.run(*bad)
    with pytest.raises(TypeError, match=r"solver.rate must be a tensor"):
        recipe.run(q, k, v, gates={"solver.rate": 0.5})


def test_a_loss_that_joins_rows_is_refused():
    q = torch.randn(2, 3, 1, 4)
    recipe = Recipe(Uniform(), LinearMap(), GradientStep(rate=0.1, loss=torch.nn.functional.mse_loss))
    with pytest.raises(ValueError, match=r"loss must return one number a row.*got \[\]. .*reduction='none'"):
        recipe.run(q, q, q)


def test_features_that_drop_an_axis_are_refused():
    q = torch.randn(2, 3, 1, 4)
    with pytest.raises(ValueError, match=r"FeatureMap.phi must keep all axes but the last"):
        Recipe(Uniform(), FeatureMap(lambda x: x[0, 0]), GradientStep(rate=0.1)).run(q, q, q)


def test_a_gate_of_nonsense_is_refused():
    q = torch.randn(2, 3, 1, 4)
    recipe = Recipe(ScalarDecay(), LinearMap(), GradientStep(rate=0.1))
    with pytest.raises(ValueError, match=r"gate weights.g must be at most 0; got 0.5"):
        recipe.run(q, q, q, gates={"weights.g": torch.full((2, 3, 1), 0.5)})
    with pytest.raises(ValueError, match=r"gate weights.g must not hold NaN"):
        recipe.run(q, q, q, gates={"weights.g": torch.full((2, 3, 1), torch.nan)})
