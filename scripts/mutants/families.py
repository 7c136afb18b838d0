"""Which families there are."""

from scripts.mutants.chosen import (
    additive,
    attention,
    channel,
    delta,
    diagonal,
    files,
    language_model,
    layers,
    mesa,
    momentum,
    native,
    operator,
    product,
    recipe,
    ridge,
    rules,
    states,
    training,
)

FAMILIES = {
    "additive": additive.MUTANTS,
    "delta": delta.MUTANTS,
    "channel": channel.MUTANTS,
    "momentum": momentum.MUTANTS,
    "ridge": ridge.MUTANTS,
    "mesa": mesa.MUTANTS,
    "diagonal": diagonal.MUTANTS,
    "product": product.MUTANTS,
    "attention": attention.MUTANTS,
    "operator": operator.MUTANTS,
    "rules": rules.MUTANTS,
    "recipe": recipe.MUTANTS,
    "states": (*states.MUTANTS, *files.MUTANTS),
    "layers": layers.MUTANTS,
    "native": native.MUTANTS,
    "language_model": language_model.MUTANTS,
    "training": training.MUTANTS,
}
"""The faults of each."""
