"""Faults in the layers, and in what they share."""

from scripts.mutants.mutant import Mutant, tests

CONTRACT, INITIAL, PRECISION = "nn/test_contract.py", "nn/test_initial.py", "nn/test_precision.py"
SEQUENCES, LAYER, GATES = "nn/sequences.py", "nn/layer.py", "nn/gates.py"
CONVOLUTION, NORM, KERNELS = "algebra/convolution.py", "algebra/norm.py", "kernels/test_parts.py"
PADS = tests(CONTRACT, "test_pads_on_either_side_change_nothing[GatedDeltaNet-batch]")
SPLITS = tests(CONTRACT, "test_any_split_equals_the_whole[GatedDeltaNet-cuts3]")


def paper(*kinds: str) -> tuple[str, ...]:
    """Return the tests that compare layers with their papers."""
    return tuple(f"tests/nn/test_published.py::test_a_layer_is_its_paper[{kind}]" for kind in kinds)


MUTANTS = (
    Mutant(
        "pads keep what they hold",
        SEQUENCES,
        "            x = x.masked_fill(~self.real.view(*self.real.shape, *(1,) * (x.ndim - 2)), 0)\n",
        "            pass\n",
        PADS,
    ),
    Mutant(
        "outputs at pads are left",
        SEQUENCES,
        "        return y if self.real is None else y.masked_fill(~",
        "        return y if self.real is None or self.order is not None else y.masked_fill(~",
        tests(CONTRACT, "test_pads_on_either_side_change_nothing[RWKV7-batch]"),
    ),
    Mutant(
        "a packed window is the one before the sequence",
        CONVOLUTION,
        "_kept(row[window + bounds[1:, None]])",
        "_kept(row[window + bounds[:-1, None]])",
        tests(KERNELS, "test_packed_sequences_are_convolved_apart[torch]"),
    ),
    Mutant(
        "a short piece forgets the window it came with",
        CONVOLUTION,
        "        return row, None, _kept(row[:, x.shape[1] :])\n",
        "        return row, None, _kept(torch.cat((torch.zeros_like(past), x), 1)[:, x.shape[1] :])\n",
        tests("nn/test_parts.py", "test_a_window_joins_what_it_held_and_what_is_new"),
    ),
    Mutant(
        "positions of packed sequences go on in one row",
        SEQUENCES,
        "start[mine] + place - self.bounds[mine]",
        "start[mine] + place",
        tests("nn/test_parts.py", "test_positions_go_on_in_every_sequence"),
    ),
    Mutant(
        "a window keeps the row it was cut from",
        CONVOLUTION,
        "    return wide.clone(memory_format=torch.contiguous_format) if wide is window else wide\n",
        "    return wide\n",
        tests(KERNELS, "test_a_window_does_not_keep_the_inputs_alive[200-torch]"),
    ),
    Mutant(
        "what lies outside of packed sequences is convolved too",
        CONVOLUTION,
        "(count < bounds[0]) | (count >= bounds[-1])",
        "count < bounds[0]",
        tests(KERNELS, "test_what_lies_outside_of_packed_sequences_reaches_nothing[torch]"),
    ),
    Mutant(
        "a norm forgets its gate where that comes first",
        NORM,
        "if factor is not None and gate_first:",
        "if factor is not None and not gate_first:",
        tests(KERNELS, "test_a_norm_is_its_definition[mean-silu-True-True-True-torch]"),
    ),
    Mutant(
        "the memory starts anew with every call",
        LAYER,
        "initial_state=None if self.past is None else self.past.memory,",
        "initial_state=None,",
        SPLITS,
    ),
    Mutant(
        "positions stand still",
        LAYER,
        "self.position + self.sequences.lengths(self._placed)",
        "self.position + 0 * self.sequences.lengths(self._placed)",
        tests(CONTRACT, "test_any_split_equals_the_whole[SoftmaxAttention-cuts3]"),
    ),
    Mutant(
        "modules within modules are not drawn anew",
        LAYER,
        "            reset_children(child)\n",
        "            pass\n",
        tests(INITIAL, "test_initial_values_are_alike_by_every_route[KimiDeltaAttention-meta]"),
    ),
    Mutant(
        "autocast reaches the gates",
        GATES,
        "        with full_precision(x):\n",
        "        if True:\n",
        tests(PRECISION, "test_autocast_leaves_gates_and_state_wide[GatedDeltaNet]"),
    ),
    Mutant(
        "decays follow the model into half precision",
        GATES,
        "                return tensor.to(out.device, torch.float32)\n",
        "                return out\n",
        tests(PRECISION, "test_a_model_in_half_precision_keeps_its_decays_wide[GatedDeltaNet]"),
    ),
    Mutant(
        "weight decay reaches what sets a decay",
        GATES,
        "found[p.ndim < 2 or id(p) in spared]",
        "found[p.ndim < 2]",
        tests(INITIAL, "test_no_weight_decay_reaches_what_sets_a_decay[KimiDeltaAttention]"),
    ),
    Mutant(
        "dt is uniform",
        GATES,
        "self.dt_bias.uniform_(math.log(1e-3), math.log(0.1)).exp()",
        "self.dt_bias.uniform_(1e-3, 0.1)",
        tests(INITIAL, "test_decays_begin_in_their_published_ranges[Mamba2-constructor]"),
    ),
    Mutant(
        "features round to 0",
        "nn/linear_attention.py",
        "torch.where(x > 0, x + 1, x.clamp(max=0).exp())",
        "torch.nn.functional.elu(x) + 1",
        tests("nn/test_parts.py", "test_features_far_below_zero_do_not_round_to_zero"),
    ),
    Mutant(
        "Titans starts by forgetting half",
        "nn/titans_linear.py",
        "start=-8.0",
        "start=0.0",
        tests(INITIAL, "test_what_a_paper_says_of_the_start_is_so[constructor]"),
    ),
    Mutant(
        "Mamba-2 scales its read",
        "nn/mamba2.py",
        "g=g, scale=1.0)",
        "g=g)",
        paper("Mamba2"),
    ),
    Mutant(
        "Mamba-2 norms before it gates",
        "nn/mamba2.py",
        "gate_first=True",
        "gate_first=False",
        paper("Mamba2"),
    ),
    Mutant(
        "OLMo's beta is not doubled",
        "nn/gated_delta_net.py",
        'variant == "olmo" if allow_neg_eigval is None else allow_neg_eigval',
        "False if allow_neg_eigval is None else allow_neg_eigval",
        paper("GatedDeltaNet-olmo"),
    ),
    Mutant(
        "RWKV-7's bonus takes the key before it is replaced",
        "nn/rwkv7.py",
        "heads(r.to(a.dtype) * k * bonus, count)",
        "heads(r.to(a.dtype) * k / (1 + (a - 1) * replacement) * bonus, count)",
        paper("RWKV7"),
    ),
    Mutant(
        "RWKV-7 erases at the key that is written",
        "nn/rwkv7.py",
        "unit(heads(k * removal, count))",
        "unit(heads(k * removal * (1 + (a - 1) * replacement), count))",
        paper("RWKV7"),
    ),
    Mutant(
        "RetNet rotates as attention does",
        "nn/ret_net.py",
        ", reach_base=True",
        "",
        paper("RetNet"),
    ),
    Mutant(
        "Mesa convolves its values",
        "nn/mesa_net.py",
        ', straight=("value",)',
        "",
        tests("nn/test_contract.py", "test_any_split_equals_the_whole[MesaNet-cuts3]") + paper("MesaNet"),
    ),
    Mutant(
        "dropout drops too few",
        "nn/dropout.py",
        "dropped - _STEPS // 2, out=found",
        "dropped - _STEPS // 2 - 2000, out=found",
        tests("nn/test_dropout.py", "test_numbers_are_dropped_or_scaled_at_the_chance"),
    ),
    Mutant(
        "four neighbours share a number",
        "nn/dropout.py",
        "drawn.view(torch.int16)[:count]",
        "drawn.view(torch.int16)[::4].repeat_interleave(4)[:count]",
        tests("nn/test_dropout.py", "test_numbers_are_dropped_or_scaled_at_the_chance"),
    ),
)
