"""Faults in what is done to a state between calls, and in what keeps packed sequences and rows apart."""

from scripts.mutants.mutant import Mutant, tests

STATES, PORTABLE, RIDGE = "states.py", "kernels/portable.py", "algebra/ridge.py"
FILE, PACKING = "states/test_states.py", "rules/test_packing.py"
CROP = tests(FILE, "test_attention_forgets_its_last_pairs test_a_crop_never_keeps_more_than_there_is")
ROWS = tests(FILE, "test_reordered_rows_go_on_as_the_rows_they_came_from[momentum_delta_rule]")
COPIES = tests(FILE, "test_copies_keep_structure_values_and_history[momentum_delta_rule]")

MUTANTS = (
    Mutant(
        "a copy shares its memory",
        STATES,
        "    return _mapped(state, lambda x: x.clone(memory_format=torch.contiguous_format))\n",
        "    return _mapped(state, lambda x: x)\n",
        COPIES,
    ),
    Mutant(
        "a detached state keeps its history",
        STATES,
        "_mapped(state, Tensor.detach)",
        "_mapped(state, Tensor.clone)",
        COPIES,
    ),
    Mutant(
        "counts of tokens change their precision",
        STATES,
        "dtype=dtype if x.is_floating_point() else None",
        "dtype=dtype",
        tests(FILE, "test_copies_keep_structure_values_and_history[softmax_attention]"),
    ),
    Mutant(
        "only the first tensor is reordered",
        STATES,
        "    return _mapped(state, lambda x: x.index_select(0, chosen.to(x.device)))\n",
        "    return _mapped(state, lambda x: x.index_select(0, chosen) if x is first else x)\n",
        ROWS,
    ),
    Mutant(
        "truths name the first row",
        STATES,
        "        return index.nonzero()[:, 0]\n",
        "        return index.nonzero()[:, 0] * 0\n",
        ROWS,
    ),
    Mutant(
        "a crop loses a token",
        STATES,
        "    named[counts] = kept\n",
        "    named[counts] = kept.clamp(max=4)\n",
        CROP,
    ),
    Mutant(
        "a crop beyond the end is let pass",
        STATES,
        "(kept < 0).any() | (kept > held).any()",
        "(kept < 0).any() | (kept > held.max()).any()",
        CROP,
    ),
    Mutant(
        "a crop keeps a view of all pairs",
        STATES,
        'axes.index("S"), 0, room).clone()',
        'axes.index("S"), 0, room)',
        CROP,
    ),
    Mutant(
        "any version is read",
        STATES,
        'if found.get("version") != str(version)',
        'if "version" not in found',
        tests(FILE, "test_another_version_is_refused"),
    ),
    Mutant(
        "any rule's file is read",
        STATES,
        'for key, words in (("rule", "hold a state of"), ("states", "have the structure")):',
        'for key, words in (("states", "have the structure"),):',
        tests(FILE, "test_another_rule_or_structure_is_refused"),
    ),
    Mutant(
        "unit length is made before sequences are apart",
        PORTABLE,
        "            tokens, states = self._widened(inputs, len(bounds) - 1)\n",
        "            tokens, states = self._widened(inputs, len(bounds) - 1)\n"
        "            self._prepare(tokens, l2norm, 1.0)\n",
        tests(PACKING, "test_junk_around_the_sequences_reaches_nothing[gated_delta_rule]"),
    ),
    Mutant(
        "a broken row breaks the batch",
        RIDGE,
        "        failed = (torch.linalg.cholesky_ex(mended).info > 0)[..., None, None]\n",
        "        failed = (torch.linalg.cholesky_ex(mended).info > 0).any().expand(mended.shape)[..., :1, :1]\n",
        tests(PACKING, "test_a_row_of_nan_is_its_own[recursive_least_squares]"),
    ),
    Mutant(
        "a file's metadata stand in any order",
        "states.py",
        "        _settle(partial)\n",
        "",
        tests("states/test_states.py", "test_the_same_tensors_make_the_same_file"),
    ),
)
