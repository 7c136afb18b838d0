"""Faults in the language model, and in its face towards transformers."""

from scripts.mutants.mutant import Mutant, tests

MODEL, LOSS, STATE = "lm/model.py", "lm/loss.py", "lm/state.py"
PATTERN, CONFIG, SAMPLING, FACE = "lm/pattern.py", "lm/config.py", "lm/sampling.py", "integrations/huggingface.py"
TESTS = {name: f"lm/test_{name}.py" for name in ("model", "config", "state", "files", "generate", "huggingface")}

MUTANTS = (
    Mutant(
        "a window sees one token more",
        "algebra/attention.py",
        "seen = (ahead >= 0) & (ahead <= reach)",
        "seen = (ahead >= -1) & (ahead <= reach)",
        tests("rules/test_window.py", "test_a_window_is_a_band_of_the_scores[chunk]"),
    ),
    Mutant(
        "what lies before a row's first pair is seen",
        "algebra/attention.py",
        "    real = place >= 0  # [B, W-1]\n",
        "    real = place >= -1  # [B, W-1]\n",
        tests("rules/test_window.py", "test_pieces_go_on_within_the_window"),
    ),
    Mutant(
        "a window's cache lacks its oldest pair",
        "nn/softmax_attention.py",
        "recent(turn.memory, self.window - 1)",
        "recent(turn.memory, self.window - 2)",
        tests("nn/test_contract.py", "test_any_split_equals_the_whole[SoftmaxAttention-window-cuts3]"),
    ),
    Mutant(
        "a repeat takes the next layer alone",
        PATTERN,
        "        return found * int(text)\n",
        "        return found[:1] * int(text)\n",
        tests(TESTS["config"], "test_a_pattern_stands_for_the_layers_that_it_writes_out"),
    ),
    Mutant(
        "options for all go before a layer's own",
        CONFIG,
        "self.layer_options.get(entry.rule, {}) | given | dict(kind.fixed)",
        "given | self.layer_options.get(entry.rule, {}) | dict(kind.fixed)",
        tests(TESTS["config"], "test_a_configuration_goes_through_json"),
    ),
    Mutant(
        "labels at pads count",
        MODEL,
        "            labels = labels.masked_fill(attention_mask == 0, IGNORED)\n",
        "            pass\n",
        tests(TESTS["model"], "test_pads_on_either_side_change_nothing[kda-sides0]"),
    ),
    Mutant(
        "labels outside of all sequences count",
        MODEL,
        "(place < cu_seqlens[0]) | (place >= cu_seqlens[-1])",
        "place < cu_seqlens[0]",
        tests(TESTS["model"], "test_packed_sequences_equal_separate_ones[kda]"),
    ),
    Mutant(
        "ignored labels lend their gradient",
        LOSS,
        "slope = slope.mul_(counts[:, None]).to(x.dtype)",
        "slope = slope.to(x.dtype)",
        tests(TESTS["model"], "test_the_loss_is_the_cross_entropy_of_the_logits[sum-True]"),
    ),
    Mutant(
        "the gradient's derivative goes through the tied weight twice",
        LOSS,
        "inputs = (x.view_as(x), weight.view_as(weight))",
        "inputs = (x, weight)",
        tests(TESTS["model"], "test_the_loss_differentiates_twice[sum]"),
    ),
    Mutant(
        "all logits at once",
        LOSS,
        "    return max(_FEWEST, _LOGITS // max(words, 1))\n",
        "    return 1 << 40\n",
        tests(TESTS["model"], "test_the_logits_of_a_long_batch_never_exist_at_once[mean]"),
    ),
    Mutant(
        "dropout stays on in evaluation",
        "lm/block.py",
        "x = x + (self.dropout(y) if self.training else y)\n        if",
        "x = x + nn.functional.dropout(y, self.dropout.p)\n        if",
        tests(TESTS["model"], "test_dropout_is_of_training_alone"),
    ),
    Mutant(
        "reordering forgets a layer",
        STATE,
        "return self._mapped(lambda layer: layer.reorder(index))",
        "return State((self.layers[0], *self._mapped(lambda layer: layer.reorder(index)).layers[1:]))",
        tests(TESTS["state"], "test_rows_go_where_they_are_told_in_every_layer[kda]"),
    ),
    Mutant(
        "what begins with meta stays without a start",
        MODEL,
        "        reset_children(self)\n",
        "        reset_children(self.blocks)\n",
        tests(TESTS["files"], "test_initial_values_are_alike_by_every_route[meta]"),
    ),
    Mutant(
        "a half default dtype narrows decays",
        "nn/gates.py",
        "return torch.empty(shape, dtype=compute_dtype(torch.get_default_dtype()))",
        "return torch.empty(shape)",
        tests(TESTS["files"], "test_initial_values_are_alike_by_every_route[bfloat16]"),
    ),
    Mutant(
        "the nucleus lacks the token that fills it",
        SAMPLING,
        "before = ordered.cumsum(-1) - ordered",
        "before = ordered.cumsum(-1)",
        tests(TESTS["generate"], "test_what_is_drawn_from_is_the_softmax_cut_to_the_likeliest"),
    ),
    Mutant(
        "a left-padded prompt goes on from its last column's pad",
        SAMPLING,
        "return torch.where(real, place, -1).amax(1)",
        "return torch.full_like(real[:, 0], real.shape[1] - 1, dtype=torch.int64)",
        tests(TESTS["generate"], "test_prompts_of_different_length_go_on_as_if_alone"),
    ),
    Mutant(
        "beams keep their own states",
        FACE,
        "self.state = None if self.state is None else self.state.reorder(beam_idx)",
        "del beam_idx",
        tests(TESTS["huggingface"], "test_beams_are_those_of_a_search_without_a_cache"),
    ),
    Mutant(
        "a packed sequence foretells the next",
        FACE,
        "labels = labels.masked_fill(last.index_fill(0, bounds.long(), True)[1:], IGNORED)",
        "del last",
        tests(TESTS["huggingface"], "test_packed_sequences_are_told_by_positions_or_bounds"),
    ),
    Mutant(
        "what was loaded is drawn anew",
        FACE,
        "                parameter.copy_(value)\n",
        "                pass\n",
        tests(TESTS["huggingface"], "test_what_a_file_lacks_is_drawn_as_at_the_start[0]"),
    ),
)
