"""Faults in the compiled kernels; each is built anew, for the plain instruction set alone."""

from scripts.mutants.mutant import Mutant, contract, tests

PLACE, CHUNK, TOKEN, BACKWARD = (f"kernels/cpu/{name}.h" for name in ("place", "chunk", "token", "backward"))
CHANNEL_FORWARD, CHANNEL_BACKWARD = "kernels/cpu/channel_forward.h", "kernels/cpu/channel_backward.h"
CHANNEL_TOKEN, MOMENTUM_TOKEN = "kernels/cpu/channel_token.h", "kernels/cpu/momentum_token.h"
MOMENTUM_BACKWARD = "kernels/cpu/momentum_backward.h"
MAPS = "kernels/cpu/linear.h"
PRODUCT, CONVERT, LIBRARY = "kernels/cpu/product.h", "kernels/cpu/convert.h", "kernels/cpu/library.cpp"
VALUES = contract("gated_delta_rule", "chunk_equals_recurrent every_precision_meets_its_bar")
EDGES = contract("gated_delta_rule", "edges_are_exact chunk_equals_recurrent")
PROXIMAL = contract("longhorn", "chunk_equals_recurrent edges_are_exact every_precision_meets_its_bar")
UNIT = contract("gated_delta_rule", "options_do_what_they_say every_precision_meets_its_bar")
HEADS = contract("gated_delta_rule", "heads_are_shared chunk_equals_recurrent")
ROWS = contract("gated_delta_rule", "rows_are_independent chunk_equals_recurrent")
STEPS = contract("gated_delta_rule", "step_loop_equals_whole split_equals_whole")
BESIDE = tests(
    "kernels/test_robustness.py",
    "test_what_a_call_leaves_behind_reaches_no_other test_nothing_is_read_or_written_beside_a_tensor",
)
HALVES = tests("kernels/test_native.py", "test_half_types_are_read_and_rounded_as_torch_does")
ONE_TOKEN = tests("kernels/test_native.py", "test_a_step_is_the_definition_in_every_precision")
BOUNDS = tests("kernels/test_native.py", "test_bounds_outside_of_the_row_are_refused_even_behind_the_checks")
ALONE = tests("kernels/test_robustness.py", "test_every_gradient_alone_is_that_of_the_token_loop")
PACKED = tests("kernels/test_robustness.py", "test_a_packed_sequence_does_not_depend_on_the_others")
CHANNEL = contract("kda", "chunk_equals_recurrent every_precision_meets_its_bar")
CHANNEL_STEPS = contract("kda", "step_loop_equals_whole split_equals_whole")
MOMENTUM = contract("momentum_delta_rule", "chunk_equals_recurrent every_precision_meets_its_bar")
EMPTY = tests("kernels/test_robustness.py", "test_a_sequence_without_tokens_hands_its_slope_on")
LINEAR = tests("kernels/test_series.py", "test_linear_maps_are_those_of_float64")
GATES = tests("kernels/test_series.py", "test_gates_are_those_of_float64")
KEPT, SPARE = "kernels/test_spare.py", "kernels/native/spare.py"
SPARSE = tests(KEPT, "test_a_trail_that_keeps_one_memory_of_four_changes_no_bit")
DENORMALS = tests("kernels/test_robustness.py", "test_denormals_count_as_zero_within_a_call_and_only_there")

MUTANTS = (
    Mutant(
        "a decay is not held from below",
        CHUNK,
        "sum += g < kSmallestDecay ? kSmallestDecay : g;",
        "sum += g;",
        EDGES,
    ),
    Mutant("decays are cumulated in float", CHUNK, "double sum = 0;", "float sum = 0;", EDGES),
    Mutant("the ends fade from the start", CHUNK, "std::exp(sum - x.total[t])", "std::exp(x.total[t])", VALUES),
    Mutant(
        "the ends do not fade",
        CHUNK,
        "load(update + t * f.step_v + i) * x.ends[t])",
        "load(update + t * f.step_v + i))",
        VALUES,
    ),
    Mutant(
        "the error is that of the unfaded memory",
        CHUNK,
        "x.minus[t] = -x.carry[t] * (",
        "x.minus[t] = -T(1) * (",
        VALUES,
    ),
    Mutant("a token reads later ones", CHUNK, "row[s] = T(-1e30);", "row[s] = T(0);", VALUES),
    Mutant(
        "what an earlier chunk left is not masked",
        CHUNK,
        "const bool above = s > t;",
        "const bool above = false;",
        BESIDE,
    ),
    Mutant(
        "a pair corrects itself",
        CHUNK,
        "x.pairs[at + t] = x.coupling[at + t] = 0;",
        "x.coupling[at + t] = 0;",
        VALUES,
    ),
    Mutant(
        "a value head reads another's key",
        PLACE,
        "of / (call.heads / call.key_heads)",
        "of % call.key_heads",
        HEADS,
    ),
    Mutant("every row is the first", PLACE, "row = c.header.bounds ? 0 : sequence;", "row = 0;", ROWS),
    Mutant("unit length adds too much", CHUNK, "+ T(1e-6)", "+ T(1e-3)", UNIT),
    Mutant("a large rate does not saturate", CHUNK, "if (!(beta > 1)) {", "if (true) {", PROXIMAL),
    Mutant("a rate grows with the key", CHUNK, "const T rest = 1 + beta * square", "const T rest = 1 + beta", PROXIMAL),
    Mutant("rows are not filled up", CONVERT, "for (int64_t i = n; i < padded<T>(n); ++i) to[i] = 0;", "", BESIDE),
    Mutant("bfloat16 rounds halves up", CONVERT, "0x7fff + ((bits >> 16) & 1)", "0x8000", HALVES),
    Mutant("small halves are read as large", CONVERT, "rest < 0x400 ? to_bits(small) : large", "large", HALVES),
    Mutant(
        "a memory does not fade from chunk to chunk",
        CHUNK,
        "before, before ? &x.last : nullptr, 0, nullptr};",
        "before, nullptr, 0, nullptr};",
        VALUES,
    ),
    Mutant(
        "a step forgets the scale",
        TOKEN,
        "own = T(f.call.scale) * dot(q, k, f.wide_k)",
        "own = dot(q, k, f.wide_k)",
        STEPS,
    ),
    Mutant(
        "the end of a row of the memory is not read by a step",
        TOKEN,
        "      found[i] += (b[0] * s[i] + b[1] * s1[i]) + (b[2] * s2[i] + b[3] * s3[i]);\n",
        "",
        ONE_TOKEN,
    ),
    Mutant(
        "a step's second write stops short of the end of a row",
        TOKEN,
        "    if constexpr (Two) next += added * value[i];\n",
        "",
        ONE_TOKEN,
    ),
    Mutant(
        "what is left out is like a tensor",
        "kernels/alike.py",
        "return found == places and same(",
        "return same(",
        tests("kernels/test_alike.py", "test_what_is_left_out_is_alike_only_to_what_is_left_out"),
    ),
    Mutant(
        "a step's kernel is given a gate that the rule fills in as it was left out",
        "dispatch.py",
        "straight = tuple(gates) == native.gates and type(rule).complete is Rule.complete",
        "straight = tuple(gates) == native.gates",
        tests("ops/test_step.py", "test_steps_fill_in_what_is_left_out_as_a_call_does"),
    ),
    Mutant(
        "a decay's slope sees its own token alone",
        BACKWARD,
        "later += x.by_carry[t];",
        "later = x.by_carry[t];",
        VALUES,
    ),
    Mutant("nothing is pulled to the first chunk", BACKWARD, "if (i > 0 || f.", "if (i > 1 || f.", ALONE),
    Mutant("a rate's slope in the key is left out", BACKWARD, "if (f.call.corrects == 2)", "if (false)", PROXIMAL),
    Mutant(
        "a rate's slope in beta is one",
        BACKWARD,
        "T(x.by_rate[t] * chunk.slope_rate[t])",
        "T(x.by_rate[t])",
        PROXIMAL,
    ),
    Mutant(
        "unit length is not differentiated",
        BACKWARD,
        "store(grad + i, (load(grad + i) - load(unit + i) * along) * factor)",
        "store(grad + i, load(grad + i) * factor)",
        ALONE,
    ),
    Mutant(
        "the memory's slope forgets the errors' decay",
        BACKWARD,
        "? chunk.scaled_carry[t] : chunk.minus[t - size]",
        "? chunk.scaled_carry[t] : -chunk.rate[t - size]",
        VALUES,
    ),
    Mutant(
        "a value's slope forgets the rate",
        BACKWARD,
        "const T rate = f.call.corrects ? chunk.rate[t] : T(1);",
        "const T rate = T(1);",
        VALUES,
    ),
    Mutant(
        "a triangle loses its diagonal",
        PRODUCT,
        "smaller(depth, (row + some + deep - 1) / deep) : depth",
        "smaller(depth, (row + some - 1) / deep) : depth",
        VALUES,
    ),
    Mutant(
        "a tile of a triangle is left out",
        PRODUCT,
        "column > row + some - 1) continue;",
        "column > row) continue;",
        VALUES,
    ),
    Mutant("the last columns are left out", PRODUCT, "if (column < columns) {", "if (column + 1 < 0) {", VALUES),
    Mutant(
        "a solve adds",
        PRODUCT,
        "value[m][j] -= factor * value[s][j];",
        "value[m][j] += factor * value[s][j];",
        VALUES,
    ),
    Mutant("bounds may fall", LIBRARY, "call.bounds[n] > call.bounds[n + 1] || ", "", BOUNDS),
    Mutant(
        "denormals stay zero after a call",
        LIBRARY,
        "~FlushToZero() { _mm_setcsr(before); }",
        "~FlushToZero() {}",
        DENORMALS,
    ),
    Mutant(
        "decays above the diagonal are an earlier chunk's",
        CHUNK,
        "for (int64_t s = seen; s < padded<T>(size); s += kLanes<T>) store(row + s, Vec<T>{});",
        "",
        BESIDE,
    ),
    Mutant("a row belongs to no tile", PRODUCT, "flat + (tile < taller)", "flat + (tile + 1 < taller)", VALUES),
    Mutant(
        "a turned triangle loses its diagonal",
        PRODUCT,
        "part == Part::upper_left ? row / deep : 0",
        "part == Part::upper_left ? row / deep + 1 : 0",
        VALUES,
    ),
    Mutant(
        "a write's slope fades from the start",
        BACKWARD,
        "pulled ? x.chunk.ends : nullptr, 1, nullptr};",
        "pulled ? x.chunk.carry : nullptr, 1, nullptr};",
        VALUES,
    ),
    Mutant(
        "the memory's slope fades by the first token alone",
        BACKWARD,
        "pulled ? &chunk.last : nullptr};",
        "pulled ? chunk.carry : nullptr};",
        VALUES,
    ),
    Mutant(
        "packed sequences leave their trails in one place",
        PLACE,
        "(every * f.C) + f.sequence",
        "(every * f.C)",
        PACKED,
    ),
    Mutant(
        "a memory between two kept ones is that of a chunk too early",
        BACKWARD,
        "x.between[n] + (behind - 1) * trail.memory",
        "x.between[n] + (behind / 2) * trail.memory",
        SPARSE,
    ),
    Mutant(
        "memories between begin at none where the call began with one",
        BACKWARD,
        "const T* start = first == 0 && !f.call.state ? nullptr : trail.state(first);",
        "const T* start = first == 0 ? nullptr : trail.state(first);",
        SPARSE,
    ),
    Mutant(
        "writes of a sparse trail lie over each other",
        PLACE,
        "memory + i % every * writes",
        "memory",
        SPARSE,
    ),
    Mutant(
        "the memory at the last chunk's start is not left",
        CHANNEL_FORWARD,
        "T* after = i + 1 < chunks ? trail.state(i + 1) : call.final ? x.state : nullptr;",
        "T* after = i + 2 < chunks ? trail.state(i + 1) : x.state;",
        CHANNEL,
    ),
    Mutant(
        "a trail is read a chunk too early",
        CHANNEL_BACKWARD,
        "x.trail.state(i);\n  const T* writes",
        "x.trail.state(i > 1 ? i - 1 : i);\n  const T* writes",
        CHANNEL,
    ),
    Mutant(
        "an earlier chunk's writes are taken",
        CHANNEL_BACKWARD,
        "const T* writes = x.trail.update(i);",
        "const T* writes = x.trail.update(i > 0 ? i - 1 : i);",
        CHANNEL,
    ),
    Mutant(
        "a channel fades as in the first block",
        CHANNEL_FORWARD,
        "before ? c.whole(f) : nullptr",
        "before ? c.spans : nullptr",
        CHANNEL,
    ),
    Mutant(
        "a channel's slope fades as in the first block",
        CHANNEL_BACKWARD,
        "pulled ? c.whole(f) : nullptr, 1};",
        "pulled ? c.spans : nullptr, 1};",
        CHANNEL,
    ),
    Mutant(
        "a step reads before the channels fade",
        CHANNEL_TOKEN,
        "multiply(q, q, c.keep, f.wide_k);",
        "",
        CHANNEL_STEPS,
    ),
    Mutant(
        "both memories at the last chunk's start are not left",
        MOMENTUM_TOKEN,
        "T* after = i + 1 < chunks ? trail.state(i + 1) : call.final ? w.state : nullptr;",
        "T* after = i + 2 < chunks ? trail.state(i + 1) : w.state;",
        MOMENTUM,
    ),
    Mutant(
        "a memory is put where an empty sequence has no room",
        MOMENTUM_BACKWARD,
        "if (begun && f.chunks())",
        "if (begun)",
        EMPTY,
    ),
    Mutant("a row's last numbers are left out", MAPS, "j = i; j < width; ++j", "j = i; j + 1 < width; ++j", LINEAR),
    Mutant("beyond four tokens the first ones come again", MAPS, "x += kTokens * width, ", "", LINEAR),
    Mutant("a map adds to nothing", MAPS, "adds ? to[t * step] + total : total", "to[t * step] + total", LINEAR),
    Mutant("a job leaves its first row out", MAPS, "n = from; n < last", "n = from + 1; n < last", LINEAR),
    Mutant("a decay overflows", MAPS, "raised > 0 ? -raised : raised", "-raised", GATES),
    Mutant("silu forgets its numbers past a vector", MAPS, "other ? other[at] : 1.0", "1.0", GATES),
    Mutant("denormals are reckoned with", LIBRARY, "FlushToZero() { _mm_setcsr(before | 0x8040); }", "FlushToZero() {}",
           DENORMALS),
    Mutant(
        "a trail's memory that a graph holds goes to the next call",
        SPARE,
        "memory.nbytes == size and view() is None",
        "memory.nbytes == size",
        tests(KEPT, "test_what_a_graph_holds_is_in_use test_memory_comes_back_once_nobody_holds_it"),
    ),
    Mutant(
        "the oldest memory is kept, not the newest",
        SPARE,
        "_newest([(memory, weakref.ref(view)), *kept], self._limit)",
        "_newest([*kept, (memory, weakref.ref(view))], self._limit)",
        tests(KEPT, "test_no_more_than_the_limit_is_kept"),
    ),
    Mutant(
        "an overwritten state looks as it was",
        "kernels/native/matrix.py",
        "        if after is states:",
        "        if after is None:",
        tests("kernels/test_alike.py", "test_an_overwritten_state_is_known_to_have_changed"),
    ),
    Mutant(
        "a call with gradients is like one without",
        "dispatch.py",
        "torch.get_num_threads(), torch.is_grad_enabled(), *options",
        "torch.get_num_threads(), *options",
        tests("kernels/test_alike.py", "test_calls_that_differ_in_one_property_take_turns_and_stay_right"),
    ),
    Mutant(
        "memory is kept beyond the limit",
        SPARE,
        "if total <= limit]",
        "if total]",
        tests(KEPT, "test_no_more_than_the_limit_is_kept"),
    ),
)
