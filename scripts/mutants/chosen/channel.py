"""Faults in the families whose channels fade apart."""

from scripts.mutants.mutant import Mutant, contract, tests

CHANNEL = "algebra/channel.py"
PRODUCTS = tuple(
    f"tests/rules/test_channel_decay.py::test_products_are_what_their_definition_sums[{size}]" for size in (9, 16, 31)
)
PROPERTIES = "chunk_equals_recurrent every_precision_meets_its_bar edges_are_exact"
ADDITIVE = contract("gla", PROPERTIES)
DELTA = contract("kda", PROPERTIES)
DECOUPLED = contract("gdn2", PROPERTIES)
GENERALIZED = contract("rwkv7", PROPERTIES)
FORMS = (*PRODUCTS, *ADDITIVE, *DELTA)

MUTANTS = (
    Mutant(
        "a pair fades by its own token's decay",
        CHANNEL,
        "torch.cat((left * w, y), -2)",
        "torch.cat((left, y), -2) * w",
        FORMS,
    ),
    Mutant(
        "pairs do not fade inside a block", CHANNEL, "torch.cat((left * w, y), -2)", "torch.cat((left, y), -2)", FORMS
    ),
    Mutant(
        "a row has not faded by its own decay",
        CHANNEL,
        "faded.append(x * since)",
        "faded.append(x * since / w.clamp(min=1e-3))",
        FORMS,
    ),
    Mutant(
        "pairs of neighbours are read as they left the earlier block's start",
        CHANNEL,
        "column = torch.cat((ahead * after, behind), -2)",
        "column = torch.cat((ahead, behind), -2)",
        FORMS,
    ),
    Mutant(
        "later rows forget what the earlier block keeps",
        CHANNEL,
        "row = torch.cat((early, late * before), -2)",
        "row = torch.cat((early, late), -2)",
        FORMS,
    ),
    Mutant("two blocks keep what the later one keeps", CHANNEL, "keep = before * after", "keep = after", FORMS),
    Mutant(
        "neighbours swap rows and columns",
        CHANNEL,
        "between = late @ ahead.mT",
        "between = early @ behind.mT",
        FORMS,
    ),
    Mutant(
        "what fills up the chunk fades it", CHANNEL, "(keep[..., None, :], 1.0)", "(keep[..., None, :], 0.0)", FORMS
    ),
    Mutant(
        "the gradient of a decay misses what it does between blocks",
        CHANNEL,
        "late * before), -2)",
        "late * before.detach()), -2)",
        DELTA,
    ),
    Mutant(
        "decays are added up as logarithms",
        CHANNEL,
        "since = w if since is None else since * w",
        "since = w if since is None else (since.log() + w.log()).exp()",
        DELTA,
    ),
    Mutant(
        "a decay of nothing is taken for a small one",
        CHANNEL,
        "faded_products((q,), (k,), g.exp())",
        "faded_products((q,), (k,), g.clamp(min=-12.0).exp())",
        ADDITIVE,
    ),
    Mutant(
        "a chunk reads the additive memory at its own end",
        CHANNEL,
        "        starts.append(state)\n        state = end * state + write\n",
        "        state = end * state + write\n        starts.append(state)\n",
        ADDITIVE,
    ),
    Mutant(
        "the additive memory does not fade from chunk to chunk",
        CHANNEL,
        "        state = end * state + write\n",
        "        state = state + write\n",
        ADDITIVE,
    ),
    Mutant(
        "the erase forgets beta", CHANNEL, "_corrections(q, k, beta[..., None] * k, v", "_corrections(q, k, k, v", DELTA
    ),
    Mutant("the erase adds", CHANNEL, "value - read @ state)", "value + read @ state)", DELTA),
    Mutant(
        "the edited memory does not fade from chunk to chunk",
        CHANNEL,
        "end * state + write.mT @ update",
        "state + write.mT @ update",
        DELTA,
    ),
    Mutant(
        "the gradient of a decay is missing",
        CHANNEL,
        "faded_products((q, erase), (write,), g.exp())",
        "faded_products((q, erase), (write,), g.exp().detach())",
        DELTA,
    ),
    Mutant(
        "the erase gate is the write's",
        CHANNEL,
        "_corrections(q, b * k, k, w * v",
        "_corrections(q, k, b * k, w * v",
        DECOUPLED,
    ),
    Mutant("the value is not gated", CHANNEL, "b * k, k, w * v, g", "b * k, k, v, g", DECOUPLED),
    Mutant(
        "what is erased is read of the faded memory",
        CHANNEL,
        "reads = torch.cat((first, early[..., :-1, :]), -2)",
        "reads = torch.cat((g[..., :1, :].exp() * first, early[..., :-1, :]), -2)",
        GENERALIZED,
    ),
    Mutant(
        "the erase looks at what its own token writes",
        CHANNEL,
        "coupling, wanted = (_one_later(x) for x in couplings)",
        "coupling, wanted = _one_later(couplings[0]), couplings[1]",
        GENERALIZED,
    ),
    Mutant(
        "the rate of the erase is forgotten", CHANNEL, "(a * kappa, k), g.exp())", "(kappa, k), g.exp())", GENERALIZED
    ),
    Mutant(
        "a chunk leaves out what it adds", CHANNEL, "state if more_ is None else state + more_", "state", GENERALIZED
    ),
    Mutant(
        "the read leaves out what the chunk adds",
        CHANNEL,
        "scores[0] @ updates + scores[1] @ v",
        "scores[0] @ updates",
        GENERALIZED,
    ),
    Mutant(
        "removal keys are given to value heads in the wrong order",
        "kernels/portable.py",
        "tokens[place] = align_heads(tokens[place], heads, axis)",
        "x = tokens[place]; "
        "tokens[place] = align_heads(x, heads, axis) if place < 3 else x.repeat(1, 1, heads // x.shape[-2], 1)",
        (
            *contract("rwkv7", "heads_are_shared"),
            *tests("rules/test_theorems.py", "test_rwkv7_that_never_erases_is_gla"),
        ),
    ),
)
