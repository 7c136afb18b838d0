"""The definition of every layer, executable: three choices and one loop."""

from innerloop.recipe.memory import MLP, FeatureMap, KernelSmoother, LinearMap
from innerloop.recipe.objective import alignment, squared_error
from innerloop.recipe.recipe import Recipe, RecipeState
from innerloop.recipe.solver import ConjugateGradients, CrossMoment, Exact, GradientStep, ImplicitStep
from innerloop.recipe.weights import (
    ChannelDecay,
    Past,
    QueryKernel,
    ScalarDecay,
    Uniform,
    WeightedDecay,
    Window,
    dot,
    exponential,
)

__all__ = [
    "MLP",
    "ChannelDecay",
    "ConjugateGradients",
    "CrossMoment",
    "Exact",
    "FeatureMap",
    "GradientStep",
    "ImplicitStep",
    "KernelSmoother",
    "LinearMap",
    "Past",
    "QueryKernel",
    "Recipe",
    "RecipeState",
    "ScalarDecay",
    "Uniform",
    "WeightedDecay",
    "Window",
    "alignment",
    "dot",
    "exponential",
    "squared_error",
]
