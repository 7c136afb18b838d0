"""Faults in the tasks, in what trains and judges on them, in what looks inside, and in the experiments on them."""

from scripts.mutants.mutant import Mutant, tests

TASKS, PROBE = "data/test_tasks.py", "probe/test_probe.py"
TRACE, NETWORK = "inspect/test_trace.py", "inspect/test_network.py"
CLAIMS = "experiments/test_experiments_probes.py"

MUTANTS = (
    Mutant(
        "overwrites: the first value is asked for",
        "data/tasks/recall.py",
        "latest = v.gather(1, place.argmax(-1))",
        "latest = v.gather(1, (place > 0).int().argmax(-1))",
        tests(TASKS, "test_overwrites_answer_with_the_latest_value_of_each_key"),
    ),
    Mutant(
        "overwrites: the shortcut forgets values that happen to be equal",
        "data/tasks/recall.py",
        "return 1 / self.writes + (1 - 1 / self.writes) / self.values",
        "return 1 / self.writes",
        tests(TASKS, "test_a_shortcut_is_what_who_ignores_the_question_scores"),
    ),
    Mutant(
        "needle: the label is the token, not the value",
        "data/tasks/recall.py",
        "labels[:, -1:] = value - self.keys",
        "labels[:, -1:] = value",
        tests(TASKS, "test_a_needle_is_found_behind_all_the_noise"),
    ),
    Mutant(
        "copying: words are told in any order",
        "data/tasks/copying.py",
        "place = distinct(count, told, self.count, generator).sort(1).values",
        "place = distinct(count, told, self.count, generator)",
        tests(TASKS, "test_copying_repeats_the_words_in_their_order"),
    ),
    Mutant(
        "arithmetic: a product binds no closer than a sum",
        "data/tasks/counting.py",
        "total = torch.where(times, total, (total + term) % m)",
        "total = (total + term) % m",
        tests(TASKS, "test_arithmetic_agrees_with_python[+-*]"),
    ),
    Mutant(
        "arithmetic: the chance of a product is that of a sum",
        "data/tasks/counting.py",
        "        return total, term * number % modulus\n",
        "        return total, (term + number) % modulus\n",
        tests(TASKS, "test_the_chance_of_arithmetic_is_that_of_all_expressions[*]"),
    ),
    Mutant(
        "drift: a token tells its own value",
        "data/tasks/regression.py",
        "before = torch.cat((torch.zeros_like(told[:, :1]), told[:, :-1]), 1)",
        "before = told",
        tests(TASKS, "test_a_drift_is_seen_through_its_points"),
    ),
    Mutant(
        "drift: the truth grows",
        "data/tasks/regression.py",
        "math.sqrt(1 - self.drift**2) * weights[-1]",
        "weights[-1]",
        tests(TASKS, "test_who_answers_nothing_to_a_drift_explains_nothing[1.0]"),
    ),
    Mutant(
        "capacity: values are asked for in the order that they were told",
        "data/tasks/regression.py",
        "v.gather(1, order.expand_as(v))",
        "v",
        tests(TASKS, "test_capacity_asks_for_every_pair_once"),
    ),
    Mutant(
        "judge: the first answer of a sequence passes for the last",
        "probe/trial.py",
        "scores[counts.cumsum(0) - 1].mean()",
        "scores[counts.cumsum(0) - counts].mean()",
        tests(PROBE, "test_a_judge_tells_right_from_wrong_and_long_from_short"),
    ),
    Mutant(
        "trial: every seed draws the same weights",
        "probe/trial.py",
        "        torch.manual_seed(seed)\n",
        "        torch.manual_seed(0)\n",
        tests(PROBE, "test_a_trial_is_its_seed_and_leaves_the_generator_alone"),
    ),
    Mutant(
        "training: a stage ends before it is mastered",
        "probe/trial.py",
        "if len(lately) >= 5 and sum(list(lately)[-5:]) / 5 >= 0.99:",
        "if len(lately) >= 5:",
        tests(PROBE, "test_stages_follow_one_another_once_mastered"),
    ),
    Mutant(
        "board: a row of a changed file is kept",
        "probe/board.py",
        'f"{torch.__version__} {chosen.key}".strip()',
        "torch.__version__",
        tests(PROBE, "test_rows_are_kept_and_run_again_when_torn_or_of_another_file"),
    ),
    Mutant(
        "trace: the surprise is that after the write",
        "inspect/trace.py",
        "        error = right - before\n",
        "        error = right - after\n",
        tests(TRACE, "test_the_delta_rule_writes_beta_of_its_surprise[0.5]"),
    ),
    Mutant(
        "trace: a half-life may lie before its write",
        "inspect/trace.py",
        "<= start.abs()[:, None] / 2) & (at > of)",
        "<= start.abs()[:, None] / 2)",
        tests(TRACE, "test_an_overwrite_ends_a_value_and_addition_does_not"),
    ),
    Mutant(
        "trace: the rank is a logarithm",
        "inspect/reading.py",
        "0.0, entropy.exp())",
        "0.0, entropy)",
        tests(TRACE, "test_the_rank_counts_what_is_held_apart"),
    ),
    Mutant(
        "network: the write is measured where the mini-batch began",
        "inspect/network.py",
        "tuple(w[0] for w in state.weights)\n\n    def asked",
        "tuple(w[0] for w in state.start)\n\n    def asked",
        tests(NETWORK, "test_the_memory_that_is_asked_is_the_one_that_is_read[titans]"),
    ),
    Mutant(
        "network: ttt is asked without its offset",
        "inspect/network.py",
        "(0.0 if offset is None else float(offset[place - 1]))",
        "0.0",
        tests(NETWORK, "test_the_memory_that_is_asked_is_the_one_that_is_read[ttt]"),
    ),
    Mutant(
        "network: hope's target is the value itself",
        "inspect/network.py",
        "return k[0], memory(v)[0]",
        "return k[0], v[0]",
        tests(NETWORK, "test_hope_s_keys_and_targets_are_its_memories"),
    ),
    Mutant(
        "network: what was never written counts as forgotten",
        "inspect/network.py",
        "torch.where(size == 0, 1.0, left /",
        "torch.where(size == 0, 0.0, left /",
        tests(NETWORK, "test_a_level_of_cms_writes_at_the_end_of_its_window"),
    ),
    Mutant(
        "layer: who observes stays",
        "nn/layer.py",
        "self._observers = tuple(other for other in self._observers if other is not observer)",
        "pass",
        tests(TRACE, "test_two_may_observe_a_layer_and_each_stops_alone"),
    ),
    Mutant(
        "layer: segments tell nothing",
        "nn/segments.py",
        "        if learner.written is not None:\n",
        "        if not learner.written:\n",
        tests(NETWORK, "test_what_a_layer_of_titans_tells_makes_its_state[mac]"),
    ),
    Mutant(
        "B2: addresses are made of contents, too",
        "experiments/blocks/overwriting.py",
        "F.normalize(to(a), dim=-1)",
        "F.normalize(to(a + c), dim=-1)",
        tests(CLAIMS, "test_a_memory_model_addresses_by_the_key_alone[delta-delta_rule]"),
    ),
    *(
        Mutant(
            f"{name}: the check asks for less",
            f"experiments/{file}.py",
            old,
            new,
            tests(CLAIMS, f"test_check_fails_on_a_doctored_result[{name}-{case}]"),
        )
        for name, file, old, new, case in (
            ("B8", "b08_trained_parity", "max(accuracies) <= 0.75", "max(accuracies) <= 0.85", "path3-0.76"),
            ("B10", "b10_tracked_parity", "assert 0.45 <= row", "assert 0.40 <= row", "path9-0.44"),
            ("B11", "b11_two_reflections", "assert row[form] >= 1", "assert row[form] >= 0.9", "path13-0.98"),
            ("B12", "b12_ceiling", "assert rnn >= 0.99", "assert rnn >= 0.98", "path19-0.989"),
            ("B13", "b13_exercises", 'near["off"] < 1e-10', 'near["off"] < 1e-5', "path24-1e-06"),
            ("D2", "d02_recall_by_state", "assert ceiling >= 0.95", "assert ceiling >= 0.7", "path31-0.5"),
        )
    ),
)
