"""Faults in the rule that takes several delta steps a token."""

from scripts.mutants.mutant import Mutant, contract, tests

RULE = "rules/delta_product.py"
FORMS = contract("delta_product", "chunk_equals_recurrent edges_are_exact")
PACKED = contract("delta_product", "packed_equals_separate")
THEOREMS = tests(
    "rules/test_delta_product.py",
    "test_delta_product_takes_gradient_steps_on_its_pairs_in_order "
    "test_delta_product_of_n_steps_is_the_delta_rule_over_n_times_as_many_tokens "
    "test_delta_product_fades_once_a_token_and_counts_packed_tokens_not_steps",
)

MUTANTS = (
    Mutant(
        "the steps of a token go backwards",
        RULE,
        "for key, value, rate in zip(k.unbind(1), v.unbind(1), beta.unbind(1), strict=True):",
        "for key, value, rate in zip(k.flip(1).unbind(1), v.flip(1).unbind(1), beta.flip(1).unbind(1), strict=True):",
        THEOREMS,
    ),
    Mutant(
        "every step of a token fades the memory",
        RULE,
        "            error = value - torch",
        "            if g is not None:\n                state = g.exp()[..., None, None] * state\n"
        "            error = value - torch",
        THEOREMS,
    ),
    Mutant(
        "the memory fades twice",
        RULE,
        "state = g.exp()[..., None, None] * state",
        "state = (2 * g).exp()[..., None, None] * state",
        (*FORMS, *THEOREMS),
    ),
    Mutant(
        "every step recalls at the first key",
        RULE,
        'error = value - torch.einsum("bgkv,bgk->bgv", state, key)',
        'error = value - torch.einsum("bgkv,bgk->bgv", state, k[:, 0])',
        THEOREMS,
    ),
    Mutant(
        "a step's error is added with the wrong sign", RULE, "error = value - torch", "error = -value + torch", THEOREMS
    ),
    Mutant(
        "the chunk form reads after the first step",
        RULE,
        "[:, :, -1].contiguous()",
        "[:, :, 0].contiguous()",
        FORMS,
    ),
    Mutant(
        "the chunk form asks at the first step",
        RULE,
        "torch.cat((_idle(q, steps), q[:, :, None]), 2)",
        "torch.cat((q[:, :, None], _idle(q, steps)), 2)",
        FORMS,
    ),
    Mutant(
        "the chunk form fades before the last step",
        RULE,
        "torch.cat((g[:, :, None], _idle(g, steps)), 2)",
        "torch.cat((_idle(g, steps), g[:, :, None]), 2)",
        FORMS,
    ),
    Mutant(
        "the chunk form never fades",
        RULE,
        "out, after = DELTA(q, k, v, (g, beta)",
        "out, after = DELTA(q, k, v, (None, beta)",
        FORMS,
    ),
    Mutant(
        "packed bounds count steps",
        RULE,
        "cu_seqlens=options.cu_seqlens * steps",
        "cu_seqlens=options.cu_seqlens",
        PACKED,
    ),
    Mutant(
        "the chunk form starts from nothing",
        RULE,
        "(g, beta), (state,), options)",
        "(g, beta), (None,), options)",
        FORMS,
    ),
)
