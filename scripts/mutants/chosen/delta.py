"""Faults in the delta family."""

from scripts.mutants.mutant import Mutant, contract

DELTA = "algebra/delta.py"
FADING = contract("gated_delta_rule", "chunk_equals_recurrent every_precision_meets_its_bar edges_are_exact")
PLAIN = contract("delta_rule", "chunk_equals_recurrent every_precision_meets_its_bar edges_are_exact")
PROXIMAL = contract("longhorn", "step_equals_the_executed_recipe chunk_equals_recurrent edges_are_exact")
LENGTH = ("tests/rules/test_theorems.py::test_longhorn_steps_less_for_a_longer_key",)

MUTANTS = (
    Mutant("the erase forgets beta", DELTA, "decayed = beta * decayed", "decayed = 1.0 * decayed", PLAIN),
    Mutant(
        "the pairs of a chunk correct each other without beta",
        DELTA,
        "coupling, wanted = beta * coupling,",
        "coupling, wanted = coupling,",
        PLAIN,
    ),
    Mutant("the error is that of the undecayed memory", DELTA, "carry * k\n", "k\n", FADING),
    Mutant(
        "the pairs of a chunk correct each other undecayed",
        DELTA,
        "fade * scores, fade * coupling",
        "fade * scores, coupling",
        FADING,
    ),
    Mutant(
        "what is read of the chunk has not faded",
        DELTA,
        "fade * scores, fade * coupling",
        "scores.tril(), fade * coupling",
        FADING,
    ),
    Mutant("the erase adds", DELTA, "value - read @ state", "value + read @ state", PLAIN),
    Mutant("the memory does not fade from chunk to chunk", DELTA, "else end * state", "else state", FADING),
    Mutant(
        "a chunk reads the memory at its own end",
        DELTA,
        "        starts.append(state)\n",
        "        starts.append(key.mT @ (value - read @ state) + (state if end is None else end * state))\n",
        PLAIN,
    ),
    Mutant("a chunk leaves its corrections unfaded", DELTA, "fade[..., -1, :, None] * k, carry", "k, carry", FADING),
    Mutant("a token does not read its own pair", DELTA, "scores = scores.tril()", "scores = scores.tril(-1)", PLAIN),
    Mutant(
        "the scores are transposed",
        DELTA,
        "scores, coupling, keys, decayed = q @ k.mT",
        "scores, coupling, keys, decayed = k @ q.mT",
        PLAIN,
    ),
    Mutant("the past is read unfaded", DELTA, "else carry * past", "else past", FADING),
    Mutant(
        "the gradient of beta misses the values",
        DELTA,
        "beta * coupling, beta * v",
        "beta * coupling, beta.detach() * v",
        PLAIN,
    ),
    Mutant(
        "the gradient of beta misses the coupling",
        DELTA,
        "coupling, wanted = beta * coupling,",
        "coupling, wanted = beta.detach() * coupling,",
        PLAIN,
    ),
    Mutant("the gradient of a key misses the coupling", DELTA, "k @ k.mT, k, k", "k.detach() @ k.mT, k, k", PLAIN),
    Mutant(
        "the rate of a small beta forgets the key's length",
        DELTA,
        "/ (1 + beta.masked_fill(large, 0) * square)",
        "/ (1 + beta.masked_fill(large, 0))",
        LENGTH,
    ),
    Mutant(
        "the rate of a large beta forgets the key's length",
        DELTA,
        "1 / beta.masked_fill(~large, 1) + square",
        "1 / beta.masked_fill(~large, 1) + 1",
        LENGTH,
    ),
    Mutant(
        "the rate does not saturate",
        DELTA,
        "torch.where(large, large_rate, small_rate)",
        "torch.where(large, beta.clamp(max=2), small_rate)",
        PROXIMAL,
    ),
    Mutant(
        "a zero key at infinite strength has no rate",
        DELTA,
        "(1 / below.masked_fill(empty, 1)).masked_fill(empty, 0)",
        "1 / below",
        PROXIMAL,
    ),
)
