"""Faults in the rules whose memories are networks, and in their layers."""

from scripts.mutants.mutant import Mutant, tests

RULES, LAYERS, RUN = "rules/test_networks.py", "nn/test_networks.py", "ops/test_network_run.py"
MOMENTUM, NORMED, SELF = "algebra/deep_momentum.py", "algebra/normed_fit.py", "algebra/self_modifying.py"
WINDOWS, CALL, GRID = "algebra/windows.py", "network_call.py", "algebra/mini_batches.py"


def contract(rule: str, names: str) -> tuple[str, ...]:
    """Return the node ids of some properties of the contract for a rule."""
    test = "tests/rules/test_network_contract.py::test_network_rule_holds_to_the_contract"
    return tuple(f"{test}[{rule}-{name}]" for name in names.split())


MUTANTS = (
    Mutant(
        "titans: gradients are taken at the moving weights",
        "rules/titans.py",
        "        return parts[1], parts[1], parts[2]\n",
        "        return parts[0], parts[1], parts[2]\n",
        tests(RULES, "test_titans_is_its_definition[linear]"),
    ),
    Mutant(
        "titans: momentum is lost between mini-batches",
        "rules/titans.py",
        "        return parts[1], parts[1], parts[2]\n",
        "        return parts[1], parts[1], tuple(0 * u for u in parts[2])\n",
        tests(RULES, "test_titans_is_its_definition[linear]"),
    ),
    Mutant(
        "titans: a write is read only by later tokens",
        MOMENTUM,
        "    z = p[..., None] * (x @ w) + r[..., None] * (x @ u) - (weight * (x @ h.mT)) @ d\n",
        "    z = p[..., None] * (x @ w) + r[..., None] * (x @ u) - (weight.tril(-1) * (x @ h.mT)) @ d\n",
        contract("titans", "chunk_equals_recurrent"),
    ),
    Mutant(
        "titans: momentum from before the block is not read",
        MOMENTUM,
        " + r[..., None] * (x @ u) - (weight",
        " - (weight",
        contract("titans", "split_equals_whole chunk_equals_recurrent"),
    ),
    Mutant(
        "titans: the first weights fade by the last token's alpha",
        MOMENTUM,
        "    z = p[..., None] * (x @ w)",
        "    z = p[..., -1:, None] * (x @ w)",
        tests(RULES, "test_every_token_fades_the_first_weights_by_its_own_alpha[chunk]"),
    ),
    Mutant(
        "titans: a damped rate forgets the weights behind its layer",
        "algebra/mlp.py",
        "        bounds.append(size if later is None else later * size)\n",
        "        bounds.append(size)\n",
        tests(RULES, "test_titans_is_its_definition[normalized]"),
    ),
    Mutant(
        "titans: no curvature damps a step",
        MOMENTUM,
        "theta / (1 + theta * bend)",
        "theta / (1 + 0 * bend)",
        tests(RULES, "test_titans_is_its_definition[normalized]"),
    ),
    Mutant(
        "ttt: the norm's signal keeps its mean",
        NORMED,
        "slope - slope.mean(-1, keepdim=True) - unit",
        "slope - unit",
        contract("ttt", "chunk_equals_recurrent"),
    ),
    Mutant(
        "ttt: the mini-batch ends at the factor of its first token",
        "rules/ttt.py",
        "        return settled(parts, self.factor[-1])\n",
        "        return settled(parts, self.factor[0])\n",
        tests(RULES, "test_ttt_is_its_definition[linear]"),
    ),
    Mutant(
        "ttt: biases do not learn",
        NORMED,
        "summed_bias + d.sum(-2)]",
        "summed_bias + 0 * d.sum(-2)]",
        contract("ttt", "chunk_equals_recurrent"),
    ),
    Mutant(
        "ttt: the factor starts anew with every piece",
        "rules/ttt.py",
        "        first = place % self.factor.shape[0]\n",
        "        first = 0 * place\n",
        contract("ttt", "split_equals_whole"),
    ),
    Mutant(
        "hope: targets carry the key's residual",
        SELF,
        "z, y, k - v if residual else None, rate",
        "z, y, k if residual else None, rate",
        contract("hope", "chunk_equals_recurrent"),
    ),
    Mutant(
        "hope: the delta term sees the undecayed weights",
        SELF,
        "    right = earlier[..., None] * (at_k if same",
        "    right = 1.0 * (at_k if same",
        contract("hope", "chunk_equals_recurrent"),
    ),
    Mutant(
        "hope: what is read begins at drawn weights",
        "nn/hope.py",
        "self.memory = first(K, last=0.0 if",
        "self.memory = first(K, last=1.0 if",
        tests(LAYERS, "test_hope_begins_by_reading_the_queries_of_its_convolved_tokens[added]"),
    ),
    Mutant(
        "hope: its convolutions stand in the tokens' place",
        "nn/convolution.py",
        "(y if self.silu else x + y)",
        "y",
        tests(LAYERS, "test_hope_begins_by_reading_the_queries_of_its_convolved_tokens[added]"),
    ),
    Mutant(
        "hope: first weights are taken for those of a memory that has moved",
        "rules/hope.py",
        "first if memory is expanded else memory",
        "first",
        contract("hope", "split_equals_whole chunk_equals_recurrent"),
    ),
    Mutant(
        "hope: the read memory takes its snapshot with the others",
        "rules/hope.py",
        "(*memories[:4], snapshots[4]) if index == 0",
        "(*memories[:4], memories[4]) if index == 0",
        tests(RULES, "test_hope_is_its_definition[mlp] test_hope_is_its_definition[literal]"),
    ),
    Mutant(
        "hope: no gradient goes through what is written",
        "rules/hope.py",
        "        return Write(unit(key), value, rate,",
        "        return Write(unit(key).detach(), value.detach(), rate,",
        contract("hope", "derivatives_are_right"),
    ),
    Mutant(
        "cms: a window's gradients are averaged",
        WINDOWS,
        "        summed + h.mT @ (rate[..., None] * d)\n",
        "        summed + h.mT @ (rate[..., None] * d) / h.shape[-2]\n",
        contract("cms", "chunk_equals_recurrent"),
    ),
    Mutant(
        "cms: what waits for its gradient is flat",
        "rules/cms.py",
        "through_activation(torch.ones_like(z), z, level",
        "through_activation(torch.ones_like(z), z.detach(), level",
        tests("rules/test_networks.py", "test_a_gradient_from_outside_has_the_derivatives_of_the_one_from_targets"),
    ),
    Mutant(
        "cms: an open window is flushed when a call ends",
        "rules/cms.py",
        "parts, started, cu_seqlens)\n        after.append(parts)\n",
        "parts, started, cu_seqlens)\n        after.append(level.turn(parts, 0))\n",
        contract("cms", "split_equals_whole"),
    ),
    Mutant(
        "rows that stand at different places turn together",
        GRID,
        "chosen(grid.real[:, done - 1], turned, state)",
        "turned",
        contract("titans", "chunk_equals_recurrent split_equals_whole"),
    ),
    Mutant(
        "packed sequences share a mini-batch",
        CALL,
        "self._rows(whole, pytree.tree_unflatten(weights, spec), None if position is None else place)",
        "self._rows(whole, pytree.tree_unflatten(weights, spec), torch.ones_like(place))",
        contract("titans", "packed_equals_separate"),
    ),
    Mutant(
        "a step looks at the values of its gates",
        CALL,
        "if _LOOKING.get() and readable",
        "if readable",
        tests(RUN, "test_steps_walk_the_sequence_and_look_at_no_value[ttt]"),
    ),
    Mutant(
        "run leaves the scale out",
        "ops.py",
        "            q, k, v, scale=scale, initial_state",
        "            q, k, v, initial_state",
        tests(RUN, "test_run_is_the_rule_s_own_function[titans]"),
    ),
    Mutant(
        "layer: forgetting begins near one half",
        "nn/titans.py",
        "GateProjection(width, heads, start=-9.0)",
        "GateProjection(width, heads, start=0.0)",
        tests(LAYERS, "test_half_of_what_was_written_is_left_after_a_thousand_tokens"),
    ),
    Mutant(
        "layer: a rate may be as large as the mini-batch is long",
        "nn/titans.py",
        "self.largest, self.momentum_max = rate / mini_batch, momentum_max",
        "self.largest, self.momentum_max = rate * mini_batch, momentum_max",
        tests(LAYERS, "test_no_memory_grows_on_a_repetitive_stream_at_the_largest_gates[titans-1]"),
    ),
    Mutant(
        "layer: writes are cut off unasked",
        "nn/titans.py",
        "        if self.stop_gradient_writes:\n",
        "        if not self.stop_gradient_writes:\n",
        tests(LAYERS, "test_gradients_stop_at_writes_if_asked[Titans]"),
    ),
    Mutant(
        "layer: hope's keep begins at one half",
        "nn/hope.py",
        "Scalars(heads, start=9.0)",
        "Scalars(heads, start=0.0)",
        tests(LAYERS, "test_half_of_what_was_written_is_left_after_a_thousand_tokens"),
    ),
    Mutant(
        "layer: the recalled of a segment is that of its end",
        "nn/segments.py",
        "        return weights, weights, velocity, torch.zeros_like(held)\n",
        "        return parts[0], weights, velocity, torch.zeros_like(held)\n",
        tests(LAYERS, "test_memory_as_context_recalls_what_earlier_segments_wrote"),
    ),
    Mutant(
        "layer: ttt rotates by the place in the sequence",
        "nn/ttt.py",
        "        places = turn.positions() % self.mini_batch\n",
        "        places = turn.positions()\n",
        tests(LAYERS, "test_ttt_rotates_anew_in_every_mini_batch"),
    ),
)
