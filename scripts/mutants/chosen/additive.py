"""Faults in the additive family and in the products of decays."""

from scripts.mutants.mutant import Mutant, contract

ADDITIVE, DECAY = "algebra/additive.py", "algebra/decay.py"
FADING = contract("mamba2", "chunk_equals_recurrent every_precision_meets_its_bar edges_are_exact")
PLAIN = contract("linear_attention", "chunk_equals_recurrent every_precision_meets_its_bar edges_are_exact")

MUTANTS = (
    Mutant(
        "a chunk reads the memory at its own end",
        ADDITIVE,
        "        starts.append(state)\n        state = write + (state if end is None else end * state)\n",
        "        state = write + (state if end is None else end * state)\n        starts.append(state)\n",
        PLAIN,
    ),
    Mutant("the memory does not fade from chunk to chunk", ADDITIVE, "else end * state", "else state", FADING),
    Mutant(
        "the memory fades by a chunk's first decay only",
        ADDITIVE,
        "carry[..., -1:, :].unbind(2)",
        "carry[..., :1, :].unbind(2)",
        FADING,
    ),
    Mutant("a token does not read its own pair", ADDITIVE, "scores.tril() @ v", "scores.tril(-1) @ v", PLAIN),
    Mutant("a token reads the pairs after it", ADDITIVE, "scores.tril() @ v", "scores.triu() @ v", PLAIN),
    Mutant("what is read of the past has not faded", ADDITIVE, "+ carry * past", "+ past", FADING),
    Mutant("what is read of the chunk has not faded", ADDITIVE, "(fade * scores) @ v", "scores.tril() @ v", FADING),
    Mutant(
        "a chunk leaves its pairs unfaded",
        ADDITIVE,
        "keys = k if fade is None else",
        "keys = k if fade is k else k if fade is None or fade.ndim else",
        FADING,
    ),
    Mutant(
        "a chunk leaves its pairs as faded as its first token sees them",
        ADDITIVE,
        "fade[..., -1, :, None] * k",
        "fade[..., 0, :, None] * k",
        FADING,
    ),
    Mutant(
        "the write is transposed into the read", ADDITIVE, "scores, past = q @ k.mT", "scores, past = k @ q.mT", PLAIN
    ),
    Mutant(
        "a token does not keep its own pair",
        DECAY,
        "device=total.device).triu(1)",
        "device=total.device).triu(0)",
        FADING,
    ),
    Mutant(
        "a pair fades by the decay of its own token too",
        DECAY,
        "total[..., None, :]\n",
        "total[..., None, :].roll(1, -1)\n",
        FADING,
    ),
    Mutant("decays are cumulated in float32", DECAY, "g.double().clamp", "g.float().clamp", FADING),
    Mutant("decays of -inf are not clamped", DECAY, ".clamp(min=SMALLEST)", "", FADING),
    Mutant("decays are clamped too soon", DECAY, "SMALLEST = -120.0", "SMALLEST = -12.0", FADING),
    Mutant(
        "the past does not fade by a chunk's first decay",
        DECAY,
        "total.to(dtype).exp()[..., None]",
        "(total - total[..., :1]).to(dtype).exp()[..., None]",
        FADING,
    ),
    Mutant(
        "the gradient of a decay misses what it does to the past",
        DECAY,
        "total.to(dtype).exp()[..., None]",
        "total.detach().to(dtype).exp()[..., None]",
        FADING,
    ),
    Mutant(
        "the gradient of a decay misses what it does inside the chunk",
        DECAY,
        "return fade_between(total, dtype)",
        "return fade_between(total.detach(), dtype)",
        FADING,
    ),
)
