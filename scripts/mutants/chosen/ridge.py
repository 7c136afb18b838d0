"""Faults in the ridge family."""

from scripts.mutants.mutant import Mutant, contract

RIDGE, IMPLICIT = "algebra/ridge.py", "algebra/implicit.py"
RULE = "recursive_least_squares"
FORMS = contract(RULE, "chunk_equals_recurrent derivatives_are_right edges_are_exact every_precision_meets_its_bar")
DERIVATIVES = contract(RULE, "chunk_equals_recurrent derivatives_are_right transforms_compose")

MUTANTS = (
    Mutant(
        "a given covariance is not made symmetric",
        RIDGE,
        "    covariance = (covariance + covariance.mT) / 2\n",
        "",
        DERIVATIVES,
    ),
    Mutant(
        "the covariance is symmetrised without the half",
        RIDGE,
        "(covariance + covariance.mT) / 2",
        "covariance + covariance.mT",
        FORMS,
    ),
    Mutant(
        "the ridge counts twice",
        RIDGE,
        "covariance.double() + diagonal * eye",
        "covariance.double() + 2 * diagonal * eye",
        (*contract(RULE, "step_equals_the_executed_recipe"), "tests/rules/test_ridge_problems.py"),
    ),
    Mutant(
        "the cross moment does not fade",
        RIDGE,
        "additive_chunks(x, k, v, g, (cross,))",
        "additive_chunks(x, k, v, None, (cross,))",
        FORMS,
    ),
    Mutant(
        "the covariance that is left has not faded",
        RIDGE,
        "memories(k, k, fade, carry, covariance)[1]",
        "memories(k, k, None, None, covariance)[1]",
        FORMS,
    ),
    Mutant(
        "the covariance that is left is that of the last chunk's start",
        RIDGE,
        "memories(k, k, fade, carry, covariance)[1]",
        "memories(k, k, fade, carry, covariance)[0][:, :, -1]",
        FORMS,
    ),
    Mutant(
        "a token solves without its own key",
        RIDGE,
        "yield (between @ pairs)",
        "yield (between.tril(-1) @ pairs)",
        FORMS,
    ),
    Mutant("a token solves with the unfaded past", RIDGE, "+ past[..., None] * start", "+ start", FORMS),
    Mutant(
        "without decay a token solves with the keys after it",
        RIDGE,
        "device=k.device).tril()",
        "device=k.device)",
        (*FORMS, "tests/rules/test_ridge_problems.py"),
    ),
    Mutant(
        "the implicit gradient has the wrong sign",
        IMPLICIT,
        "return -(w * ctx.product",
        "return (w * ctx.product",
        DERIVATIVES,
    ),
    Mutant(
        "the implicit gradient of the decay is missing",
        RIDGE,
        "additive_chunks(x, k, k, g, (covariance,))",
        "additive_chunks(x, k, k, None if g is None else g.detach(), (covariance,))",
        DERIVATIVES,
    ),
    Mutant(
        "the implicit gradient of the first covariance is missing",
        RIDGE,
        "additive_chunks(x, k, k, g, (covariance,))",
        "additive_chunks(x, k, k, g, (covariance.detach(),))",
        DERIVATIVES,
    ),
    Mutant(
        "the implicit gradient sees a key once, not twice",
        RIDGE,
        "additive_chunks(x, k, k, g, (covariance,))",
        "additive_chunks(x, k, k.detach(), g, (covariance,))",
        DERIVATIVES,
    ),
    Mutant(
        "the gradient of the query is not solved for",
        IMPLICIT,
        "w = _Implicit.apply(ctx.solve, ctx.product, grad, *params)",
        "w = grad",
        DERIVATIVES,
    ),
    Mutant(
        "the second derivative does not solve again",
        IMPLICIT,
        "w = _Implicit.apply(ctx.solve, ctx.product, grad, *params)",
        "w = _Implicit.apply(ctx.solve, ctx.product, grad.detach(), *params)",
        contract(RULE, "second_derivatives_are_right"),
    ),
)
