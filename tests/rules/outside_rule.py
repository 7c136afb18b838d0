"""A rule as a user writes it, in a file of their own: its step alone, with names of its own."""

import torch

import innerloop
from innerloop.recipe import GradientStep, LinearMap, Recipe, ScalarDecay


class Outside(innerloop.Rule):
    """One gradient step on a memory that fades."""

    name = "outside_rule"
    recipe = Recipe(ScalarDecay(), LinearMap(), GradientStep())
    gates = (
        innerloop.Gate("g", low=-float("inf"), high=0.0, feeds="weights.g", enforced=True),
        innerloop.Gate("rate", low=0.0, high=1.0, feeds="solver.rate"),
    )

    def step(self, q, k, v, *, g, rate, state):
        faded = g.exp()[..., None, None] * state
        error = v - torch.einsum("bgkv,bgk->bgv", faded, k)
        state = faded + torch.einsum("bgk,bgv->bgkv", k, rate[..., None] * error)
        return torch.einsum("bgkv,bgk->bgv", state, q), state


RULE = innerloop.register(Outside())
