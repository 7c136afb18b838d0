"""Faults in the conjugate-gradient family and its rule."""

from scripts.mutants.mutant import Mutant, contract, tests

MESA, STEPS, IMPLICIT, RULE = (
    "algebra/mesa.py",
    "algebra/conjugate_gradients.py",
    "algebra/implicit.py",
    "rules/mesa.py",
)
FORMS = contract("mesa", "chunk_equals_recurrent edges_are_exact")
STEP = contract("mesa", "step_equals_the_executed_recipe")
DERIVATIVES = contract("mesa", "chunk_equals_recurrent derivatives_are_right transforms_compose")
THEOREMS = "rules/test_ridge_problems.py"
EARLY = tests(THEOREMS, "test_mesa_that_stops_early_is_the_same_in_every_form_and_no_solution")
PREFIX = tests(THEOREMS, "test_mesa_solves_the_weighted_ridge_problem_of_every_prefix")

MUTANTS = (
    Mutant(
        "a given covariance is not made symmetric in the chunk form",
        MESA,
        "    covariance = (covariance + covariance.mT) / 2\n",
        "",
        tests(THEOREMS, "test_mesa_makes_a_given_covariance_symmetric"),
    ),
    Mutant(
        "a given covariance is not made symmetric in the step",
        RULE,
        "(state.H_kk + state.H_kk.mT) / 2",
        "state.H_kk",
        tests(THEOREMS, "test_mesa_makes_a_given_covariance_symmetric"),
    ),
    Mutant(
        "the covariance does not weigh its pairs",
        MESA,
        "pairs = fade if beta is None else fade * beta[..., None, :]",
        "pairs = fade",
        FORMS,
    ),
    Mutant(
        "a pair weighs by its reader's weight",
        MESA,
        "fade * beta[..., None, :]",
        "fade * beta[..., :, None]",
        FORMS,
    ),
    Mutant(
        "the cross moment does not weigh its pairs",
        MESA,
        "additive_chunks(x, written, v, g, (cross,))",
        "additive_chunks(x, k, v, g, (cross,))",
        FORMS,
    ),
    Mutant(
        "the step weighs a pair twice in the covariance",
        RULE,
        "covariance + written[..., :, None] * k[..., None, :]",
        "covariance + written[..., :, None] * (k if beta is None else beta[..., None] * k)[..., None, :]",
        (*STEP, *PREFIX),
    ),
    Mutant(
        "the step's cross moment does not fade", RULE, "g.exp()[..., None, None] * cross", "cross", (*STEP, *PREFIX)
    ),
    Mutant(
        "the past counts as if it had not faded",
        MESA,
        "carry, x @ starts), lamb",
        "torch.ones_like(carry), x @ starts), lamb",
        FORMS,
    ),
    Mutant(
        "chunks start from the covariance of the whole",
        MESA,
        "starts, _ = memories(_weighted(k, beta), k, fade, carry, covariance)",
        "_, end = memories(_weighted(k, beta), k, fade, carry, covariance)\n"
        "    starts = torch.stack([end] * k.shape[2], 2)",
        FORMS,
    ),
    Mutant(
        "Jacobi's start leaves out the carried covariance",
        MESA,
        "diagonal = carry * starts.diagonal(dim1=-2, dim2=-1)[..., None, :] + pairs",
        "diagonal = pairs",
        EARLY,
    ),
    Mutant(
        "the chunk form takes one step more",
        MESA,
        "return conjugate_gradients(product, q, iterations=iterations,",
        "return conjugate_gradients(product, q, iterations=iterations + 1,",
        EARLY,
    ),
    Mutant(
        "the diagonal is the preconditioner too",
        MESA,
        "diagonal=lamb, start=q / diagonal)",
        "diagonal=diagonal, start=q / diagonal)",
        tests(THEOREMS, "test_mesa_needs_few_steps_where_keys_point_few_ways"),
    ),
    Mutant(
        "both forms take one step less",
        STEPS,
        "for _ in range(iterations):",
        "for _ in range(iterations - 1):",
        ("tests/recipe/test_conjugate_gradients.py", *PREFIX),
    ),
    Mutant(
        "a solved row goes on dividing noise by noise",
        STEPS,
        "solved = size <= floor",
        "solved = size < 0 * floor",
        ("tests/recipe/test_conjugate_gradients.py", *contract("mesa", "edges_are_exact")),
    ),
    Mutant(
        "the implicit gradient forgets the ridge",
        MESA,
        "additive_chunks(x, _weighted(k, beta), k, g, (covariance,))[0] + lamb * x",
        "additive_chunks(x, _weighted(k, beta), k, g, (covariance,))[0]",
        DERIVATIVES,
    ),
    Mutant(
        "the step's implicit gradient forgets the covariance",
        MESA,
        "(covariance @ x[..., None])[..., 0] + lamb * x",
        "(covariance.detach() @ x[..., None])[..., 0] + lamb * x",
        DERIVATIVES,
    ),
    Mutant(
        "under transforms the value is the solution's, not the steps'",
        IMPLICIT,
        "+ (slopes - slopes.detach())",
        "* 0 + slopes",
        tests(THEOREMS, "test_mesa_that_stops_early_stops_early_under_transforms_too"),
    ),
    Mutant(
        "under transforms the derivative is half",
        IMPLICIT,
        "+ (slopes - slopes.detach())",
        "+ (slopes - slopes.detach()) / 2",
        contract("mesa", "transforms_compose"),
    ),
    Mutant(
        "the ridge of one head serves all",
        RULE,
        "lamb.expand(*v.shape[:-1], lamb.shape[-1])",
        "lamb[:1].expand(*v.shape[:-1], lamb.shape[-1])",
        (*STEP, *PREFIX),
    ),
)
