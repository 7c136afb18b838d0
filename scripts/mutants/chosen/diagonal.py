"""Faults in the family whose memory fades by another decay in every entry."""

from scripts.mutants.mutant import Mutant, contract, tests

DIAGONAL, RULE = "algebra/diagonal.py", "rules/longhorn_diagonal.py"
FORMS = contract("longhorn_diagonal", "chunk_equals_recurrent edges_are_exact")
THEOREMS = tests(
    "rules/test_longhorn_diagonal.py",
    "test_diagonal_longhorn_keeps_the_diagonal_of_the_proximal_solution "
    "test_diagonal_longhorn_is_longhorn_where_keys_have_one_channel "
    "test_diagonal_longhorn_overwrites_an_axis_at_the_largest_beta",
)
PARTS = tests(
    "rules/test_longhorn_diagonal.py",
    "test_diagonal_longhorn_does_not_depend_on_how_many_chunks_run_together "
    "test_diagonal_longhorn_has_second_derivatives_over_several_parts",
)

MUTANTS = (
    Mutant(
        "the step fades by the key, not its square",
        RULE,
        "1 - k.square()[..., :, None]",
        "1 - k.abs()[..., :, None]",
        THEOREMS,
    ),
    Mutant(
        "the step writes by the weight itself", RULE, "(rate * v)[..., None, :]", "(beta * v)[..., None, :]", THEOREMS
    ),
    Mutant(
        "the rate sees one channel of the key",
        RULE,
        "k.square().sum(-1, keepdim=True)",
        "k.square()[..., :1]",
        THEOREMS,
    ),
    Mutant(
        "beta overflows where it is large",
        RULE,
        "rate = proximal_rate(beta, k.square().sum(-1, keepdim=True))",
        "rate = beta / (1 + beta * k.square().sum(-1, keepdim=True))",
        THEOREMS,
    ),
    Mutant(
        "an infinite weight passes the checks",
        RULE,
        "high=torch.finfo(torch.float32).max",
        'high=float("inf")',
        THEOREMS,
    ),
    Mutant(
        "the chunk form fades by the key, not its square",
        DIAGONAL,
        "torch.addcmul(key.new_ones(()), key * key, pace, value=-1)",
        "torch.addcmul(key.new_ones(()), key, pace, value=-1)",
        FORMS,
    ),
    Mutant(
        "the chunk form writes by the weight itself",
        DIAGONAL,
        "(q, k, rate, rate * v)",
        "(q, k, rate, beta * v)",
        FORMS,
    ),
    Mutant(
        "chunks side by side all start from the first memory",
        DIAGONAL,
        "        starts.append(state)\n        state = torch",
        "        starts.append(starts[0] if starts else state)\n        state = torch",
        FORMS,
    ),
    Mutant(
        "what a chunk makes does not fade inside it",
        DIAGONAL,
        "torch.addcmul(key * new, fade, made)",
        "key * new + made",
        FORMS,
    ),
    Mutant(
        "the next part starts where this one did",
        DIAGONAL,
        "        out, state = run(",
        "        out, _ = run(",
        (*PARTS, *FORMS),
    ),
    Mutant(
        "the backward pass takes the memory after the token for the one before",
        DIAGONAL,
        "faded = slope * before",
        "faded = slope * after",
        FORMS,
    ),
    Mutant(
        "the key's gradient misses what it erases",
        DIAGONAL,
        "slope @ new.mT - 2 * key * (faded @ pace.mT)",
        "slope @ new.mT",
        FORMS,
    ),
    Mutant(
        "the key's gradient counts half of what it erases",
        DIAGONAL,
        "2 * key * (faded @ pace.mT)",
        "key * (faded @ pace.mT)",
        FORMS,
    ),
    Mutant(
        "a chunk's slope does not reach the chunk before it",
        DIAGONAL,
        "        end = torch.addcmul(added, kept, end)\n",
        "        end = kept * end\n",
        FORMS,
    ),
    Mutant(
        "the slope of what a token reads fades too late",
        DIAGONAL,
        "fade * torch.addcmul(made, query, grad)",
        "torch.addcmul(fade * made, query, grad)",
        FORMS,
    ),
    Mutant(
        "the second derivative takes the first for a constant",
        DIAGONAL,
        "grads, create_graph=True)",
        "[x.detach() for x in grads], create_graph=True)",
        PARTS,
    ),
)
