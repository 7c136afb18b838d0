"""Which families there are."""

from scripts.mutants.chosen import additive, attention, delta, momentum, operator, recipe, ridge, rules, states

FAMILIES = {
    "additive": additive.MUTANTS,
    "delta": delta.MUTANTS,
    "momentum": momentum.MUTANTS,
    "ridge": ridge.MUTANTS,
    "attention": attention.MUTANTS,
    "operator": operator.MUTANTS,
    "rules": rules.MUTANTS,
    "recipe": recipe.MUTANTS,
    "states": states.MUTANTS,
}
"""The faults of each."""
