"""What each rule's transition can track: its eigenvalues, computed from its own step."""

import pytest
import torch

from innerloop import rules
from innerloop.testing import draw_call

DOUBLE = torch.float64
FADING, SLOWLY, UNIT, DOUBLED, NONE = (-9.0, 0.0), (-0.2, 0.0), (0.0, 1.0), (0.0, 2.0), (0.0, 0.0)
LADDER = {
    # What a transition can track (Dive into Deep Learning, table 12.5.1): the interval that its eigenvalues fill, by
    # the range of each gate. A further rule is a further line.
    "linear_attention": ({}, 1.0, 1.0),
    "normalized_linear_attention": ({}, 1.0, 1.0),
    "retention": ({"g": FADING}, 0.0, 1.0),
    "mamba2": ({"g": FADING}, 0.0, 1.0),
    "recursive_least_squares": ({"g": FADING}, 0.0, 1.0),
    "gla": ({"g": FADING}, 0.0, 1.0),
    "longhorn": ({"beta": (0.0, 99.0)}, 0.0, 1.0),
    "delta_rule": ({"beta": UNIT}, 0.0, 1.0),
    "gated_delta_rule": ({"g": FADING, "beta": UNIT}, 0.0, 1.0),
    "momentum_delta_rule": ({"theta": UNIT, "eta": NONE, "alpha": NONE}, 0.0, 1.0),
    "kda": ({"g": FADING, "beta": UNIT}, 0.0, 1.0),
    "gdn2": ({"g": FADING, "b": UNIT, "w": UNIT}, 0.0, 1.0),
    "delta_product": ({"g": FADING, "beta": UNIT}, 0.0, 1.0),
    "longhorn_diagonal": ({"beta": (0.0, 99.0)}, 0.0, 1.0),
    "mesa": ({"g": FADING, "beta": UNIT}, 0.0, 1.0),
    "rwkv7": ({"g": FADING, "a": UNIT}, -1.0, 1.0),
    "delta_rule, doubled": ({"beta": DOUBLED}, -1.0, 1.0),
    "gated_delta_rule, doubled": ({"g": SLOWLY, "beta": DOUBLED}, -1.0, 1.0),
    "momentum_delta_rule, doubled": ({"theta": DOUBLED, "eta": NONE, "alpha": NONE}, -1.0, 1.0),
    "kda, doubled": ({"g": SLOWLY, "beta": DOUBLED}, -1.0, 1.0),
    "delta_product, doubled": ({"g": SLOWLY, "beta": DOUBLED}, -1.0, 1.0),
    "gdn2, doubled": ({"g": SLOWLY, "b": DOUBLED, "w": UNIT}, -1.0, 1.0),
}
ROTATING = "delta_product, doubled"
"""Two reflections are a rotation: its eigenvalues leave the line for the disc (Siems et al., 2025)."""


def transitions(call):
    """Return what one token of a call does to the whole of a state, ``[G, n, n]``, whatever else it writes."""
    rule, heads = call.rule, call.v.shape[-2]
    sizes = {"G": 1, "K": call.k.shape[-1], "V": 1}
    shapes = [[sizes[axis] for axis in axes] for axes in rule.states.values()]
    lengths = [torch.Size(shape).numel() for shape in shapes]
    rows = torch.cat((torch.eye(sum(lengths), dtype=DOUBLE), torch.zeros(1, sum(lengths), dtype=DOUBLE)))
    parts = [x.view(-1, *shape) for x, shape in zip(rows.split(lengths, 1), shapes, strict=True)]
    state = rule.packed_state([x.expand(-1, heads, *x.shape[2:]) for x in parts])
    fixed = {gate.name for gate in rule.gates if "B" not in gate.axes}
    every = call.map(lambda name, x: x if name in fixed else x.expand(len(rows), *x.shape[1:]))
    every.state = state
    after = torch.cat([x.flatten(2) for x in rule.state_tensors(every.run(form="recurrent")[1])], -1)
    return (after[:-1] - after[-1:]).permute(1, 2, 0)


def eigenvalues(row):
    """Return those of a thousand tokens, with gates drawn from the row's ranges."""
    call = draw_call(row.partition(",")[0], B=1, T=1, H=1000, G=1000, K=2, V=1)
    generator = torch.Generator().manual_seed(3)
    for name, (bottom, top) in LADDER[row][0].items():
        draw = torch.rand(call.gates[name].shape, generator=generator, dtype=DOUBLE)
        call.gates[name] = bottom + (top - bottom) * draw
    return torch.linalg.eigvals(transitions(call))


@pytest.mark.parametrize("row", [row for row in LADDER if row != ROTATING])
def test_the_eigenvalues_of_a_transition_fill_the_interval_of_their_rung(row):
    _, low, high = LADDER[row]
    values = eigenvalues(row)
    assert values.imag.abs().max() < 1e-6
    assert low - 1e-9 < values.real.min() < low + 0.2
    assert high - 0.2 < values.real.max() < high + 1e-9


def test_two_reflections_a_token_turn_the_memory():
    values = eigenvalues(ROTATING)
    assert values.abs().max() < 1 + 1e-9
    turning = values[values.imag.abs() > 0.1]
    assert turning.numel() > 0.1 * values.numel()
    assert turning.abs().max() > 0.9
    assert turning.real.min() < -0.5
    assert turning.real.max() > 0.5


def test_the_ladder_has_every_rule_of_a_state_of_one_size():
    assert {row.partition(",")[0] for row in LADDER} == {x.RULE.name for x in rules.ALL if not x.RULE.grows}
