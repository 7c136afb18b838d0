"""Faults in attention."""

from scripts.mutants.mutant import Mutant, contract

ATTENTION = "algebra/attention.py"
RULE = "softmax_attention"
FORMS = contract(RULE, "chunk_equals_recurrent split_equals_whole packed_equals_separate edges_are_exact")
STEPS = contract(
    RULE, "step_equals_the_executed_recipe step_loop_equals_whole chunk_equals_recurrent packed_equals_separate"
)
THEOREMS = ("tests/rules/test_theorems.py",)
RAGGED = ("tests/rules/test_ragged.py",)

MUTANTS = (
    Mutant("a token behind a past does not see itself", ATTENTION, "<= own[..., None]", "< own[..., None]", FORMS),
    Mutant(
        "a token behind a past sees the next one",
        ATTENTION,
        "last = lengths[:, None] - q.shape[-2]",
        "last = lengths[:, None] + 1 - q.shape[-2]",
        FORMS,
    ),
    Mutant(
        "tokens without a past see those after them", ATTENTION, "is_causal=True", "is_causal=False", FORMS + THEOREMS
    ),
    Mutant(
        "the scale counts twice without a past",
        ATTENTION,
        "is_causal=True, scale=1.0",
        "is_causal=True",
        contract(RULE, "options_do_what_they_say heads_are_shared step_equals_the_executed_recipe") + THEOREMS,
    ),
    Mutant(
        "the scale counts twice behind a past",
        ATTENTION,
        "attn_mask=seen[:, None], scale=1.0",
        "attn_mask=seen[:, None]",
        FORMS,
    ),
    Mutant(
        "the first pairs are not counted",
        ATTENTION,
        "return k, v, lengths + k.shape[1]\n",
        "return k, v, lengths\n",
        STEPS,
    ),
    Mutant(
        "a new pair goes behind the padding",
        ATTENTION,
        "place = lengths[:, None] + torch",
        "place = past_k.shape[1] + 0 * lengths[:, None] + torch",
        RAGGED,
    ),
    Mutant(
        "a new pair takes the place of the last",
        ATTENTION,
        "place = lengths[:, None] + torch",
        "place = (lengths[:, None] - 1).clamp(min=0) + torch",
        STEPS,
    ),
    Mutant(
        "values are appended at the keys' expense",
        ATTENTION,
        "_append(past_v, v, lengths, place)",
        "_append(past_v, 0 * v, lengths, place)",
        STEPS,
    ),
    Mutant(
        "one pair of the past is lost",
        ATTENTION,
        "device=past.device) < lengths[:, None]",
        "device=past.device) < lengths[:, None] - 1",
        STEPS,
    ),
    Mutant(
        "what stands in the padding is kept", ATTENTION, "past.masked_fill(~held[..., None, None], 0)", "past", RAGGED
    ),
    Mutant(
        "all queries see what the first block of them sees",
        ATTENTION,
        "last.split(QUERIES, -1)",
        "[last[..., :1].expand(-1, x.shape[-2]) for x in q.split(QUERIES, -2)]",
        FORMS,
    ),
    Mutant(
        "a later block of queries sees what an earlier one does",
        ATTENTION,
        "last.split(QUERIES, -1)",
        "[last[..., : x.shape[-2]] for x in q.split(QUERIES, -2)]",
        RAGGED,
    ),
)
