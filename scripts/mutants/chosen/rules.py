"""Faults in the rules themselves: their steps, and what they hand to a family."""

from scripts.mutants.mutant import Mutant, contract

THEOREMS = ("tests/rules/test_theorems.py", "tests/rules/test_ridge_problems.py", "tests/rules/test_edges.py")


def step(rule: str) -> tuple[str, ...]:
    """Return what holds a rule's step to its recipe and to the theorems."""
    return (*contract(rule, "step_equals_the_executed_recipe"), *THEOREMS)


def forms(rule: str) -> tuple[str, ...]:
    """Return what holds the forms of a rule to each other."""
    return (*contract(rule, "chunk_equals_recurrent edges_are_exact"), *THEOREMS)


def file(rule: str) -> str:
    """Return the path of a rule."""
    return f"rules/{rule}.py"


ADD = "k[..., :, None] * v[..., None, :]"

MUTANTS = (
    Mutant(
        "linear attention reads before it writes",
        file("linear_attention"),
        'return torch.einsum("bgkv,bgk->bgv", state, q), state',
        f'return torch.einsum("bgkv,bgk->bgv", state - {ADD}, q), state',
        step("linear_attention"),
    ),
    Mutant(
        "mamba2 fades the new pair too",
        file("mamba2"),
        f"g.exp()[..., None, None] * state + {ADD}",
        f"g.exp()[..., None, None] * (state + {ADD})",
        step("mamba2"),
    ),
    Mutant(
        "mamba2's chunk form has no decay",
        file("mamba2"),
        "ADDITIVE(q, k, v, (g,)",
        "ADDITIVE(q, k, v, (None,)",
        forms("mamba2"),
    ),
    Mutant(
        "retention's heads start one power late",
        file("retention"),
        "torch.exp2(-5 - head)",
        "torch.exp2(-4 - head)",
        step("retention"),
    ),
    Mutant(
        "the delta rule adds its error's opposite",
        file("delta_rule"),
        'error = v - torch.einsum("bgkv,bgk->bgv", state, k)',
        'error = torch.einsum("bgkv,bgk->bgv", state, k) - v',
        step("delta_rule"),
    ),
    Mutant(
        "the delta rule's chunk form starts from nothing",
        file("delta_rule"),
        "(None, beta), (state,)",
        "(None, beta), (None,)",
        forms("delta_rule"),
    ),
    Mutant(
        "the gated delta rule takes the undecayed memory's error",
        file("gated_delta_rule"),
        'torch.einsum("bgkv,bgk->bgv", faded, k)',
        'torch.einsum("bgkv,bgk->bgv", state, k)',
        step("gated_delta_rule"),
    ),
    Mutant(
        "the gated delta rule fades after the write",
        file("gated_delta_rule"),
        "state = faded + k[..., :, None] * (beta[..., None] * error)[..., None, :]",
        "state = faded + g.exp()[..., None, None] * k[..., :, None] * (beta[..., None] * error)[..., None, :]",
        step("gated_delta_rule"),
    ),
    Mutant(
        "the gated delta rule keeps what it should fade",
        file("gated_delta_rule"),
        "state = faded + k",
        "state = state + k",
        step("gated_delta_rule"),
    ),
    Mutant(
        "longhorn steps by beta",
        file("longhorn"),
        "rate = proximal_rate(beta, k.square().sum(-1))",
        "rate = beta",
        step("longhorn"),
    ),
    Mutant(
        "momentum steps by the velocity before",
        file("momentum_delta_rule"),
        "memory = (1 - alpha)[..., None, None] * memory + velocity",
        "memory = (1 - alpha)[..., None, None] * memory + state.U",
        step("momentum_delta_rule"),
    ),
    Mutant(
        "momentum forgets its own move",
        file("momentum_delta_rule"),
        "(1 - alpha)[..., None, None] * memory + velocity",
        "(1 - alpha)[..., None, None] * (memory + velocity)",
        step("momentum_delta_rule"),
    ),
    Mutant(
        "momentum takes the faded memory's error",
        file("momentum_delta_rule"),
        'torch.einsum("bgkv,bgk->bgv", memory, k) - v',
        'torch.einsum("bgkv,bgk->bgv", (1 - alpha)[..., None, None] * memory, k) - v',
        step("momentum_delta_rule"),
    ),
    Mutant(
        "momentum damps the gradient as well",
        file("momentum_delta_rule"),
        "eta[..., None, None] * velocity - k[..., :, None]",
        "eta[..., None, None] * velocity - (1 - eta)[..., None, None] * k[..., :, None]",
        step("momentum_delta_rule"),
    ),
    Mutant(
        "momentum's default scale is that of the others",
        file("momentum_delta_rule"),
        "unit_scale = True",
        "unit_scale = False",
        (*contract("momentum_delta_rule", "options_do_what_they_say"), "tests/rules/test_theorems.py"),
    ),
    Mutant(
        "the weights are summed before the token",
        file("normalized_linear_attention"),
        "(q * total).sum(-1, keepdim=True)",
        "(q * state.z).sum(-1, keepdim=True)",
        step("normalized_linear_attention"),
    ),
    Mutant(
        "the chunk form loses the first sum of keys",
        file("normalized_linear_attention"),
        "torch.cat((state.S, state.z[..., None]), -1)",
        "torch.cat((state.S, 0 * state.z[..., None]), -1)",
        forms("normalized_linear_attention"),
    ),
    Mutant(
        "weights that sum to nothing read everything",
        file("normalized_linear_attention"),
        "(read / weight.masked_fill(empty, 1)).masked_fill(empty, 0)",
        "read / weight.masked_fill(empty, 1)",
        (
            "tests/rules/test_theorems.py::test_normalized_linear_attention_reads_zero_where_weights_of_two_signs_cancel",
        ),
    ),
    Mutant(
        "least squares do not fade the cross moment",
        file("recursive_least_squares"),
        "g.exp()[..., None, None] * covariance, g.exp()[..., None, None] * cross",
        "g.exp()[..., None, None] * covariance, cross",
        step("recursive_least_squares"),
    ),
    Mutant(
        "least squares fade the new pair's key",
        file("recursive_least_squares"),
        "covariance = covariance + k[..., :, None] * k[..., None, :]",
        "covariance = covariance + (1 if g is None else g.exp()[..., None, None]) * k[..., :, None] * k[..., None, :]",
        step("recursive_least_squares"),
    ),
    Mutant(
        "least squares by step do not make a covariance symmetric",
        file("recursive_least_squares"),
        "(state.H_kk + state.H_kk.mT) / 2, state.H_kv",
        "state.H_kk, state.H_kv",
        contract("recursive_least_squares", "derivatives_are_right chunk_equals_recurrent"),
    ),
    Mutant(
        "attention reads the padding behind its pairs",
        file("softmax_attention"),
        ">= state.lengths[:, None]",
        "> state.lengths[:, None]",
        ("tests/rules/test_ragged.py",),
    ),
    Mutant(
        "attention's softmax runs over heads",
        file("softmax_attention"),
        "scores.softmax(-1)",
        "scores.softmax(1)",
        step("softmax_attention"),
    ),
)
