"""The faults put in by hand, a file a family."""

from scripts.mutants.chosen import additive, attention, delta, momentum, operator, ridge, rules

FAMILIES = {
    "additive": additive.MUTANTS,
    "delta": delta.MUTANTS,
    "momentum": momentum.MUTANTS,
    "ridge": ridge.MUTANTS,
    "attention": attention.MUTANTS,
    "operator": operator.MUTANTS,
    "rules": rules.MUTANTS,
}
