"""Sequences packed in one row: each is alone, wherever it starts, whatever the others and the rest of the row hold."""

from itertools import accumulate, pairwise

import pytest
import torch

from innerloop import rule as registry
from innerloop import rules
from innerloop.checks import refusal
from innerloop.testing import assert_close, draw_call, forms, outcome

NAMES = [module.RULE.name for module in rules.ALL]
DOUBLE = torch.float64
CHUNK = 4
FORMS = {
    "recurrent": {"form": "recurrent"},
    "chunk": {"form": "chunk", "chunk_size": CHUNK, "backend": "torch"},
    "native": {"form": "chunk", "chunk_size": CHUNK, "backend": "cpu"},
}
CASES = [
    (name, form)
    for name in NAMES
    for form in list(FORMS)[: 1 + registry.get(name).has_chunk + (not refusal(registry.get(name)))]
]


def packed_call(name, lengths, *, before=0, behind=0, seed=0, edges=False):
    """Draw a packed call with a state a sequence, NaN around the sequences, and their bounds."""
    bounds = list(accumulate(lengths, initial=before))
    call = draw_call(name, B=1, T=bounds[-1] + behind, seed=seed, edges=edges)
    call.state = draw_call(name, B=len(lengths), T=3, seed=seed + 1, state=True).state
    timed = timed_names(call)

    def surround(key, x):
        if key not in timed:
            return x
        x = x.clone()
        x[:, :before] = x[:, bounds[-1] :] = torch.nan
        return x

    return call.map(surround).tracked(), bounds


def timed_names(call):
    return {"q", "k", "v", *(gate.name for gate in call.rule.gates if "T" in gate.axes)}


def row(state_tensors, n, rule):
    return rule.packed_state([x[n : n + 1] for x in state_tensors])


def kept(rule, state, n):
    """Return the float states of sequence n, what grows up to its length."""
    tensors = dict(zip(rule.states, (x[n : n + 1] for x in rule.state_tensors(state)), strict=True))
    if rule.grows:
        (length,) = (int(x) for name, x in tensors.items() if not rule.states[name])
        tensors = {name: x[:, :length] for name, x in tensors.items() if rule.states[name]}
    return tensors


def cotangent(x, seed):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def loss_of(rule, out, state, bounds, numbers):
    """Add up a fixed functional of the outputs and final states of some of the sequences."""
    total = torch.zeros((), dtype=DOUBLE)
    for n in numbers:
        start, stop = bounds[n], bounds[n + 1]
        parts = [out[:, start:stop], *kept(rule, state, n).values()]
        total = total + sum((x * cotangent(x, 10 * n + i)).sum() for i, x in enumerate(parts))
    return total


def slopes_of(call, loss):
    tensors = call.tensors()
    found = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(tensors, found, strict=True))


def hold_to_separate_runs(call, bounds, what, **form):
    """Compare outputs, final states and all gradients with those of every sequence run by itself."""
    rule, numbers = call.rule, range(len(bounds) - 1)
    out, state = call.run(cu_seqlens=torch.tensor(bounds), **form)
    apart = call.tracked()
    total = torch.zeros((), dtype=DOUBLE)
    for n, (start, stop) in enumerate(pairwise(bounds)):
        piece = apart.tokens(start, stop)
        piece.state = row(rule.state_tensors(apart.state), n, rule)
        want, after = piece.run(form="recurrent")
        assert_close(out[:, start:stop], want, DOUBLE, what=f"{what} o of sequence {n}")
        assert_close(kept(rule, state, n), kept(rule, after, 0), DOUBLE, what=f"{what} sequence {n}")
        parts = [want, *kept(rule, after, 0).values()]
        total = total + sum((x * cotangent(x, 10 * n + i)).sum() for i, x in enumerate(parts))
    got, want = slopes_of(call, loss_of(rule, out, state, bounds, numbers)), slopes_of(apart, total)
    assert_close(got, want, DOUBLE, "gradients", f"{what} gradient of")


@pytest.mark.parametrize(("name", "form"), CASES)
def test_a_sequence_may_start_at_every_residue_of_the_chunk(name, form):
    for first in range(2 * CHUNK + 1):
        call, bounds = packed_call(name, [first, CHUNK + 1, 2], before=first % 3)
        hold_to_separate_runs(call, bounds, f"start at {first}", **FORMS[form])


@pytest.mark.parametrize(("name", "form"), CASES)
def test_any_lengths_equal_separate_runs_in_values_states_and_gradients(name, form):
    for seed, lengths in enumerate(([0], [0, 0, 1], [5, 1, 7, 3], [9, 0, 9, 4, 9, 0], [1] * 6, [17, 16, 15])):
        call, bounds = packed_call(name, lengths, before=seed % 2, behind=seed % 3, seed=seed, edges=True)
        hold_to_separate_runs(call, bounds, str(lengths), **FORMS[form])


@pytest.mark.parametrize("name", [name for name in NAMES if registry.get(name).has_chunk])
def test_sequences_longer_than_several_chunks_have_grids_of_their_own(name):
    call, bounds = packed_call(name, [130, 65, 200])
    call = call.map(lambda _, x: x.detach())
    for size in (64, 128):
        out, state = call.run(cu_seqlens=torch.tensor(bounds), form="chunk", chunk_size=size)
        for n, (start, stop) in enumerate(pairwise(bounds)):
            piece = call.tokens(start, stop)
            piece.state = row(call.rule.state_tensors(call.state), n, call.rule)
            want, after = piece.run(form="recurrent")
            assert_close(out[:, start:stop], want, DOUBLE, what=f"chunks of {size}, sequence {n}")
            assert_close(kept(call.rule, state, n), kept(call.rule, after, 0), DOUBLE, what=f"sequence {n}")


@pytest.mark.parametrize(("name", "form"), CASES)
@pytest.mark.parametrize("junk", [False, True])
def test_a_sequence_never_sees_another_to_the_bit(name, form, junk):
    rule, lengths, changed = registry.get(name), [5, 1, 7, 5, 3], 0
    call, bounds = packed_call(name, lengths)
    other, _ = packed_call(name, lengths, seed=7)
    inside, others = slice(bounds[changed], bounds[changed + 1]), range(1, len(lengths))
    timed = timed_names(call)

    def perturb(key, x):
        if key not in timed and key not in rule.states:
            return x.detach().clone().requires_grad_()
        x = x.detach().clone()
        place = (slice(None), inside) if key in timed else (slice(changed, changed + 1),)
        # Gates are looked at: they hold other numbers, the rest may be anything.
        bad = junk and (key in "qkv" or key in rule.states)
        x[place] = torch.nan if bad else other.tensors()[key].detach()[place]
        return x.requires_grad_()

    runs = []
    for given in (call, call.map(perturb)):
        out, state = given.run(cu_seqlens=torch.tensor(bounds), **FORMS[form])
        slopes = slopes_of(given, loss_of(rule, out, state, bounds, others))
        for key, x in slopes.items():  # the Jacobian is block-diagonal
            if (key in timed or key in rule.states) and not (junk and given is not call):
                assert not (x[:, inside] if key in timed else x[changed]).any(), f"{key} of sequence 0 is seen"
        found = {"o": out[:, bounds[1] :]}
        found |= {f"{key} {n}": x for n in others for key, x in kept(rule, state, n).items()}
        found |= {f"slope of {key}": x[:, bounds[1] :] if key in timed else x[1:] for key, x in slopes.items()
                  if key in timed or key in rule.states}  # fmt: skip
        runs.append(found)
    for key, x in runs[0].items():
        assert x.isfinite().all(), key
        assert torch.equal(x, runs[1][key]), f"{key} follows sequence 0"


@pytest.mark.parametrize("name", NAMES)
def test_junk_around_the_sequences_reaches_nothing(name):
    for options in ({}, {"use_qk_l2norm_in_kernel": True, "scale": 0.7}):
        for form in forms(registry.get(name)):
            call, bounds = packed_call(name, [2, 0, 5], before=3, behind=2)
            out, state = call.run(cu_seqlens=torch.tensor(bounds), **options, **form)
            assert all(x.isfinite().all() for x in outcome(call.rule, (out, state)).values())
            for key, slope in slopes_of(call, out.sum() + loss_of(call.rule, out, state, bounds, range(3))).items():
                assert slope.isfinite().all(), f"{form} {options}: junk reached the gradient of {key}"
                if key in timed_names(call):
                    assert not slope[:, :3].any()
                    assert not slope[:, -2:].any()


@pytest.mark.parametrize("name", NAMES)
def test_bounds_of_either_integer_type_are_the_same(name):
    call, bounds = packed_call(name, [3, 4])
    wide, narrow = (call.run(cu_seqlens=torch.tensor(bounds, dtype=x)) for x in (torch.int64, torch.int32))
    for key, x in outcome(call.rule, wide).items():
        assert torch.equal(x, outcome(call.rule, narrow)[key])


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_nan_is_its_own(name):
    fixed = {gate.name for gate in registry.get(name).gates if "B" not in gate.axes}
    call = draw_call(name, B=3, T=9, state=True)

    def spoil(key, x):
        x = x.clone()
        if key in {"q", "k", "v", *call.rule.states} - fixed:
            x[:1] = torch.nan
        return x

    for form in forms(call.rule):
        runs = []
        for given in (call.tracked(), call.map(spoil).tracked()):
            values = outcome(call.rule, given.run(**form))
            slopes = slopes_of(given, sum((x[1:] * cotangent(x[1:], 3)).sum() for x in values.values()))
            runs.append([x[1:] for key, x in (*values.items(), *slopes.items()) if key not in fixed])
        for x, y in zip(*runs, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_a_memory_of_pairs_has_room_for_the_longest_sequence_and_no_more(form):
    call, bounds = packed_call("softmax_attention", [3, 0, 9, 1])
    held = torch.tensor([4, 2, 0, 1])
    wide = [torch.cat((x, x.new_zeros(4, 30, *x.shape[2:])), 1) for x in (call.state.keys, call.state.values)]
    wide = type(call.state)(*wide, held)
    for before, wanted in ((None, 9), (wide, 9), (wide._replace(lengths=held + 7), 16)):
        _, after = call.run(initial_state=before, cu_seqlens=torch.tensor(bounds), form=form)
        assert after.keys.shape[1] == after.values.shape[1] == wanted
        assert int(after.lengths.max()) == wanted
    _, after = call.run(initial_state=None, cu_seqlens=torch.tensor([0, 0, 0]), form=form)
    assert after.keys.shape[:2] == (2, 1), "even where nobody has a token"
