"""Faults in the operator layer: what lies between a call and a family's algebra."""

from scripts.mutants.mutant import Mutant, contract, tests

OPERATOR, PORTABLE, LOOP = "kernels/operator.py", "kernels/portable.py", "kernels/loop.py"
CHUNKS, PACKING, SHAPES = "algebra/chunks.py", "algebra/packing.py", "shapes.py"
RULE = "gated_delta_rule"
COMPILE = "tests/kernels/test_compile.py"
FORMS = contract(
    RULE, "chunk_equals_recurrent split_equals_whole derivatives_are_right step_equals_the_executed_recipe"
)
OPTIONS = contract(RULE, "options_do_what_they_say step_equals_the_executed_recipe")
PACKED = contract(f"{RULE} softmax_attention", "packed_equals_separate")
AUTOCAST = tuple(f"{COMPILE}::test_autocast_keeps_arithmetic_and_state_wide[{x}]" for x in (RULE, "delta_rule"))
OPCHECK = tuple(f"{COMPILE}::test_operators_pass_the_frameworks_own_check[{x}]" for x in (RULE, "softmax_attention"))
COMPILED = (*OPCHECK, f"{COMPILE}::test_compiled_equals_eager_at_any_length_without_recompiling[chunk-{RULE}]")
LAYER, LIKE, ALIKE = "kernels/test_operator.py", "kernels/test_alike.py", "kernels/alike.py"
ROOM = tests("rules/test_packing.py", "test_a_memory_of_pairs_has_room_for_the_longest_sequence_and_no_more")
STEPS = tests(LAYER, f"test_gradients_of_a_call_are_those_of_its_steps[{RULE}]")
SECOND = contract(RULE, "derivatives_are_right second_derivatives_are_right")

MUTANTS = (
    Mutant(
        "gradients go to the input before theirs",
        OPERATOR,
        "ctx.needs_input_grad[1 : inputs + 1]",
        "ctx.needs_input_grad[:inputs]",
        (*STEPS, *contract(RULE, "derivatives_are_right")),
    ),
    Mutant(
        "the gradient of the query is dropped",
        OPERATOR,
        "*(next(found) if need else None for need in needs)",
        "*(next(found) * (i > 0) if need else None for i, need in enumerate(needs))",
        FORMS,
    ),
    Mutant(
        "the initial state has no gradient",
        OPERATOR,
        "        return list(found)\n",
        "        return [*found[:-1], found[-1] * 0]\n",
        STEPS,
    ),
    Mutant(
        "the final state has no gradient",
        OPERATOR,
        "if grad is not None and x.requires_grad]",
        "if grad is not None and x is outputs[0]]",
        FORMS,
    ),
    Mutant(
        "the output's gradient is lost beside the state's",
        OPERATOR,
        "if grad is not None and x.requires_grad]",
        "if grad is not None and x.requires_grad][-1:]",
        STEPS,
    ),
    Mutant(
        "the gradients of two gates change places",
        OPERATOR,
        "        return list(found)\n",
        "        return [*found[:3], *found[3:5][::-1], *found[5:]]\n",
        tests(LAYER, "test_gradients_of_a_call_are_those_of_its_steps[momentum_delta_rule]"),
    ),
    Mutant(
        "autocast stays on in the backward",
        OPERATOR,
        "with full_precision(args[0]):",
        "with torch.enable_grad():",
        AUTOCAST,
    ),
    Mutant(
        "autocast stays on in the forward",
        PORTABLE,
        "return torch.autocast(tensor.device.type, enabled=False) if autocasts(tensor) else nullcontext()",
        "return nullcontext()",
        AUTOCAST,
    ),
    Mutant("the second derivative is cut off", OPERATOR, "args, True)", "args, False)", SECOND),
    Mutant(
        "a state that did not change is handed back itself",
        OPERATOR,
        "output = output.clone(memory_format=torch.contiguous_format)",
        "pass",
        tests(LAYER, "test_outputs_share_no_memory_with_inputs_or_each_other"),
    ),
    Mutant(
        "attention hands its inputs back",
        "kernels/families.py",
        "    fresh=False,\n",
        "",
        tests(LAYER, "test_what_a_call_returns_is_its_own[softmax_attention]"),
    ),
    Mutant(
        "no token at all hands the state back itself",
        PORTABLE,
        "tuple(state.clone() for state in states)",
        "states",
        tests(LAYER, f"test_what_a_call_returns_is_its_own[{RULE}]"),
    ),
    Mutant(
        "a call like one that passed is not looked at",
        "checks.py",
        "            return last\n",
        "            return last[0], []\n",
        tests("ops/test_errors.py", "test_a_call_like_one_that_passed_is_still_looked_at"),
    ),
    Mutant(
        "what holds a state is not part of its structure",
        "checks.py",
        "            type(states),\n",
        "",
        tests("ops/test_errors.py", "test_a_call_like_one_that_passed_is_still_looked_at"),
    ),
    Mutant(
        "the fake output has the queries' heads",
        OPERATOR,
        "max(q.shape[-2], v.shape[-2]), v.shape[-1]))\n        room",
        "q.shape[-2], v.shape[-1]))\n        room",
        COMPILED,
    ),
    Mutant("packed pairs have room for all tokens", PORTABLE, 'sizes["S"] = room or after', 'sizes["S"] = after', ROOM),
    Mutant("a state's own pairs have no room", "dispatch.py", "cu_seqlens.diff() + held", "cu_seqlens.diff()", ROOM),
    Mutant(
        "whether gradients are wanted is not asked in Python",
        ALIKE,
        "x.requires_grad, x.is_neg()",
        "x.is_neg()",
        tests(LIKE, "test_only_what_is_alike_is_so"),
    ),
    Mutant(
        "a tensor given twice is asked elsewhere",
        ALIKE,
        "TensorGuards is None or len(set(map(id, tensors))) < len(tensors)",
        "TensorGuards is None",
        tests(LIKE, "test_tensors_given_twice_are_alike_too"),
    ),
    Mutant(
        "tangents go the straight way",
        ALIKE,
        " and forward_ad._current_level < 0",
        "",
        tests(LIKE, "test_tangents_and_compilers_close_the_way"),
    ),
    Mutant(
        "the fake state has the inputs' precision",
        OPERATOR,
        "self.portable.state_dtypes(compute_dtype(v.dtype))",
        "self.portable.state_dtypes(v.dtype)",
        tests(LAYER, f"test_fake_tensors_of_half_types_are_like_the_real_ones[{RULE}]"),
    ),
    Mutant(
        "a batched input is unbatched along the wrong axis",
        OPERATOR,
        "else x.movedim(dim, 0)",
        "else x.movedim(dim, 0).flip(0)",
        tests(LAYER, f"test_vmap_takes_any_axis_of_some_of_the_inputs[{RULE}]"),
    ),
    Mutant(
        "every member of a mapped packed call is the first",
        OPERATOR,
        "op(*(x[i] if",
        "op(*(x[0] if",
        tests(LAYER, f"test_packed_sequences_can_be_mapped[{RULE}]"),
    ),
    Mutant("the scale counts twice", PORTABLE, "tokens[0] * scale", "tokens[0] * scale * scale", OPTIONS),
    Mutant("the scale is left out", PORTABLE, "tokens[0] * scale", "tokens[0]", OPTIONS),
    Mutant("only queries are made unit length", PORTABLE, "unit(tokens[1])", "tokens[1]", OPTIONS),
    Mutant("unit length is exact", PORTABLE, "keepdim=True) + 1e-6)", "keepdim=True) + 1e-12)", OPTIONS),
    Mutant(
        "arithmetic of half types stays in half",
        SHAPES,
        "return torch.float64 if dtype == torch.float64 else torch.float32",
        "return dtype",
        tests(
            "kernels/test_compile.py", f"test_half_inputs_with_wide_gates_give_half_outputs_and_a_wide_state[{RULE}]"
        ),
    ),
    Mutant(
        "value heads take turns over key heads",
        SHAPES,
        "tensor.repeat_interleave(heads // tensor.shape[axis], dim=axis)",
        "torch.cat([tensor] * (heads // tensor.shape[axis]), dim=axis)",
        contract(RULE, "step_equals_the_executed_recipe heads_are_shared"),
    ),
    Mutant(
        "a token loop forgets",
        LOOP,
        "out, states = step(*token, states)",
        "out, after = step(*token, states)\n        states = after if length == 1 else states",
        FORMS,
    ),
    Mutant(
        "a token loop runs backwards",
        LOOP,
        "token.unbind(1) for token in tokens]",
        "token.flip(1).unbind(1) for token in tokens]",
        FORMS,
    ),
    Mutant(
        "the rest of a sequence starts anew",
        CHUNKS,
        "function(*pieces, states)",
        "function(*pieces, tuple(0 * x for x in states) if start else states)",
        FORMS,
    ),
    Mutant(
        "heads and tokens change places behind the chunks",
        CHUNKS,
        "token.transpose(1, 2).unflatten(2, (-1, size))",
        "token.transpose(1, 2).unflatten(2, (size, -1)).transpose(2, 3)",
        FORMS,
    ),
    Mutant(
        "packed states come back in the order of their lengths",
        PACKING,
        "for n in members], device=device).argsort()",
        "for n in members], device=device)",
        PACKED,
    ),
    Mutant(
        "packed sequences take the first rows' states",
        PACKING,
        "tuple(state[rows] for state in states)",
        "tuple(state[: len(members)] for state in states)",
        PACKED,
    ),
    Mutant("packed sequences begin one token early", PACKING, "[bounds[n] + t for", "[bounds[n] + t - 1 for", PACKED),
    Mutant(
        "packed outputs come back in the order of their lengths",
        PACKING,
        "place[order] = torch.arange(len(order), device=order.device)",
        "place[order.sort().values] = torch.arange(len(order), device=order.device)",
        PACKED,
    ),
    Mutant(
        "tokens outside of all sequences read the first output",
        PACKING,
        "torch.full((total,), len(order), device=order.device)",
        "torch.zeros(total, dtype=torch.int64, device=order.device)",
        tests(LAYER, f"test_tokens_outside_of_all_packed_sequences_read_zero[{RULE}]"),
    ),
)
