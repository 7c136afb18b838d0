"""Faults in the momentum family."""

from scripts.mutants.mutant import Mutant, contract

MOMENTUM, DECAY = "algebra/momentum.py", "algebra/decay.py"
FORMS = contract("momentum_delta_rule", "chunk_equals_recurrent every_precision_meets_its_bar edges_are_exact")

MUTANTS = (
    Mutant("the error is taken of the memory already faded", MOMENTUM, "_one_earlier(p, 1.0)", "p", FORMS),
    Mutant("the error is taken after the momentum's move", MOMENTUM, "_one_earlier(r, 0.0)", "r", FORMS),
    Mutant(
        "a write is seen one token late inside the chunk",
        MOMENTUM,
        "_rows_earlier(weight)",
        "_rows_earlier(_rows_earlier(weight))",
        FORMS,
    ),
    Mutant(
        "the velocity moves the first token's error", MOMENTUM, "_one_earlier(r, 0.0)", "_one_earlier(r, 1.0)", FORMS
    ),
    Mutant(
        "velocity does not fade by a chunk's first momentum",
        MOMENTUM,
        "momentum[..., 0] * eta[..., :1]",
        "momentum[..., 0]",
        FORMS,
    ),
    Mutant("the old velocity counts only once", MOMENTUM, "(product @ m[..., None])[..., 0]", "p * m", FORMS),
    Mutant(
        "a write is not carried on by momentum",
        MOMENTUM,
        "weight = product @ momentum * theta",
        "weight = product * theta",
        FORMS,
    ),
    Mutant(
        "the velocity that is left forgets theta",
        MOMENTUM,
        "momentum[..., -1, :] * theta",
        "momentum[..., -1, :]",
        FORMS,
    ),
    Mutant(
        "the old velocity does not reach the next chunk's memory",
        MOMENTUM,
        "+ take_u * velocity - step_s",
        "- step_s",
        FORMS,
    ),
    Mutant(
        "the velocity does not fade from chunk to chunk",
        MOMENTUM,
        "keep_u * velocity - step_u",
        "velocity - step_u",
        FORMS,
    ),
    Mutant(
        "the memory does not fade from chunk to chunk", MOMENTUM, "keep_s * memory + take_u", "memory + take_u", FORMS
    ),
    Mutant("the write has the wrong sign", MOMENTUM, "take_u * velocity - step_s", "take_u * velocity + step_s", FORMS),
    Mutant(
        "the read leaves out the velocity that came before",
        MOMENTUM,
        "(p[..., None] * q, r[..., None] * q)",
        "(p[..., None] * q, 0 * q)",
        FORMS,
    ),
    Mutant("the gradient of alpha is missing", MOMENTUM, "keep = 1 - alpha", "keep = 1 - alpha.detach()", FORMS),
    Mutant(
        "the gradient of eta misses what it does inside the chunk",
        MOMENTUM,
        "running_products(eta)",
        "running_products(eta.detach())",
        FORMS,
    ),
    Mutant(
        "the gradient of theta misses the velocity that is left",
        MOMENTUM,
        "momentum[..., -1, :] * theta",
        "momentum[..., -1, :] * theta.detach()",
        FORMS,
    ),
    Mutant(
        "a running product includes its own start",
        DECAY,
        "row = factor[..., None] * row + start",
        "row = factor[..., None] * (row + start)",
        FORMS,
    ),
    Mutant(
        "a running product passes by a zero",
        DECAY,
        "row = factor[..., None] * row + start",
        "row = factor.clamp(min=1e-3)[..., None] * row + start",
        contract("momentum_delta_rule", "edges_are_exact"),
    ),
)
