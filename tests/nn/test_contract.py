"""What every layer holds to: splits, steps, pads, packing, rows, gradients."""

import pytest
import torch
from torch.utils import _pytree as pytree

from innerloop.testing import assert_close, error


def leaves(state):
    return [x for x in pytree.tree_leaves(state) if x is not None]


def assert_same_state(got, want, what=""):
    assert set(got.windows) == set(want.windows)
    assert torch.equal(got.position, want.position)
    for x, y in zip(leaves(got.memory), leaves(want.memory), strict=True):
        assert error(x, y) <= 1e-10, f"{what} memory"
    for key, window in want.windows.items():
        assert error(got.windows[key], window) <= 1e-10, f"{what} window {key}"


def assert_equal_states(got, want):
    for x, y in zip(leaves(got), leaves(want), strict=True):
        assert torch.equal(x, y)


def random_leaves(state):
    """Return a state whose float tensors are leaves that want gradients, and those tensors."""
    flat, spec = pytree.tree_flatten(state)
    flat = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in flat]
    return pytree.tree_unflatten(flat, spec), [x for x in flat if x.requires_grad]


@pytest.mark.parametrize("cuts", [(0,), (1,), (2, 3), (5, 7), (8,), (3, 3, 6)])
def test_any_split_equals_the_whole(kit, layer, cuts):
    x = kit.tokens(2, 9)
    want, final = layer(x)
    state, parts = None, []
    for piece in x.tensor_split(cuts, dim=1):
        y, state = layer(piece, state)
        parts.append(y)
    assert error(torch.cat(parts, 1), want) <= 1e-10
    assert_same_state(state, final)


def test_splits_of_a_long_sequence_equal_the_whole(kit, plain):
    layer, x = kit.build(plain), kit.tokens(1, 140)
    want, final = layer(x)
    parts, state = [], None
    for piece in x.tensor_split((64, 65, 128, 139), dim=1):
        y, state = layer(piece, state)
        parts.append(y)
    assert_close(torch.cat(parts, 1), want, torch.float64)
    assert_same_state(state, final)


def test_a_loop_of_single_tokens_equals_the_whole_and_repeats_to_the_bit(kit, layer):
    x = kit.tokens(3, 8)
    want, final = layer(x)
    runs = []
    for _ in range(2):
        junk = [torch.full((64,), torch.nan, dtype=torch.float64) for _ in range(200)]
        del junk  # what the allocator hands out next holds NaN
        state, parts = None, []
        for t in range(8):
            y, state = layer(x[:, t : t + 1], state)
            assert y.shape == (3, 1, kit.width)
            parts.append(y)
        runs.append(torch.cat(parts, 1))
    assert torch.equal(*runs)
    assert error(runs[0], want) <= 1e-10
    assert_same_state(state, final)


def test_one_token_needs_no_state(kit, layer):
    x = kit.tokens(1, 7)
    layer.eval()
    for _ in range(2):
        assert error(layer(x[:, :1])[0], layer(x)[0][:, :1]) <= 1e-10


def test_every_part_of_the_state_changes_with_every_token(kit, name):
    if name in kit.networks:
        return  # the snapshot of a mini-batch stays until its end
    layer = kit.build(name)
    _, state = layer(kit.tokens(1, 5))
    for t in range(3):
        _, after = layer(kit.tokens(1, 1, seed=9 + t), state)
        for x, y in zip(leaves(state), leaves(after), strict=True):
            full = not x.is_floating_point() and x is not state.position  # how many pairs a full window keeps
            assert x.shape != y.shape or not torch.equal(x, y) or full or x.numel() == 0
        state = after


def test_a_state_has_one_structure_at_any_length_in_training_and_out_of_it(kit, layer):
    shapes = set()
    for training in (True, False):
        layer.train(training)
        for length in (0, 1, 2, 20):
            y, state = layer(kit.tokens(2, length))
            assert y.shape == (2, length, kit.width)
            flat, spec = pytree.tree_flatten(state)
            grown = {x.shape[1] for x in flat[:2]} if layer.rule == "softmax_attention" else set()
            shapes.add((str(spec), tuple((x.dtype, tuple(s for s in x.shape if s not in grown)) for x in flat)))
    assert len(shapes) == 1 or layer.rule == "softmax_attention"
    assert all(x.dtype in (torch.float64, torch.int64) for x in flat)


def test_what_comes_later_changes_nothing_before(kit, plain):
    layer, x = kit.build(plain), kit.tokens(2, 17)
    want, _ = layer(x)
    for length in range(1, 17):
        piece = x[:, :length].requires_grad_()
        y, _ = layer(piece)
        assert error(y, want[:, :length]) <= 1e-10
    (slope,) = torch.autograd.grad(y[:, 8].sum(), piece)
    assert not slope[:, 9:].any()
    assert slope[:, :9].any(-1).all() or plain == "Longhorn"


def test_strides_and_empty_batches_are_taken(kit, layer):
    x = kit.tokens(2, 9)
    want, _ = layer(x)
    wide = torch.stack((x, -x), 2).flatten(1, 2).mT.contiguous().mT
    assert not wide.is_contiguous()
    assert error(layer(wide[:, ::2])[0], want) <= 1e-10
    assert error(layer(x[:1].expand(3, -1, -1))[0][2:], want[:1]) <= 1e-10
    y, state = layer(x[:0])
    assert (y.shape, state.position.shape) == ((0, 9, kit.width), (0,))


def padded(kit, sides):
    """Return a batch with pads on the sides said, its mask, and the real tokens of each row."""
    x, mask = kit.tokens(len(sides), 9), torch.zeros(len(sides), 9, dtype=torch.int64)
    for n, (first, last) in enumerate(sides):
        mask[n, first:last] = 1
    return x, mask, [x[n : n + 1, first:last] for n, (first, last) in enumerate(sides)]


SIDES = [(0, 9), (3, 9), (0, 5), (8, 9), (2, 7), (4, 4)]


@pytest.mark.parametrize("rows", [SIDES, SIDES[1:2], SIDES[2:3]], ids=["batch", "left-alone", "right-alone"])
def test_pads_on_either_side_change_nothing(kit, layer, rows):
    x, mask, real = padded(kit, rows)
    junk = x.masked_fill(mask[..., None] == 0, torch.nan).requires_grad_()
    y, state = layer(junk, attention_mask=mask)
    assert not y[mask == 0].any()
    for n, piece in enumerate(real):
        want, final = layer(piece)
        assert error(y[n : n + 1][:, mask[n] == 1], want) <= 1e-10
        got = state.select([n])
        if layer.rule != "softmax_attention":
            assert_same_state(got, final, f"row {n}")
    total = y.square().sum()
    slopes = torch.autograd.grad(total, [junk, *layer.parameters()])
    assert not slopes[0][mask == 0].any()
    apart = sum(layer(piece)[0].square().sum() for piece in real)
    for got, want in zip(slopes[1:], torch.autograd.grad(apart, list(layer.parameters())), strict=True):
        assert error(got, want) <= 1e-9


def test_pieces_may_be_padded_each_in_its_own_way(kit, layer):
    first, before, real = padded(kit, [(0, 4), (3, 9), (5, 5)])
    second, after, more = padded(kit, [(2, 9), (0, 1), (1, 8)])
    second = second + 1
    more = [piece + 1 for piece in more]
    y, state = layer(first, attention_mask=before)
    z, state = layer(second.masked_fill(after[..., None] == 0, torch.nan), state, attention_mask=after)
    last, state = layer(first[:, :1], state)
    for n, (a, b) in enumerate(zip(real, more, strict=True)):
        want, final = layer(torch.cat((a, b, first[n : n + 1, :1]), 1))
        got = torch.cat((y[n][before[n] == 1], z[n][after[n] == 1], last[n]))
        assert error(got, want[0]) <= 1e-10
        assert torch.equal(state.position[n], final.position[0])


def test_packed_sequences_equal_separate_ones(kit, layer):
    x = kit.tokens(1, 16)
    bounds = [1, 6, 7, 7, 10, 14]
    packing = torch.tensor(bounds)
    junk = x.clone()
    junk[:, :1], junk[:, 14:] = torch.nan, torch.nan
    y, state = layer(junk, cu_seqlens=packing)
    z, after = layer(x, state.detach(), cu_seqlens=packing.int())
    for n in range(5):
        piece = x[:, bounds[n] : bounds[n + 1]]
        want, final = layer(piece)
        assert error(y[:, bounds[n] : bounds[n + 1]], want) <= 1e-10
        again, last = layer(piece, final)
        assert error(z[:, bounds[n] : bounds[n + 1]], again) <= 1e-10
        if layer.rule != "softmax_attention":
            assert_same_state(state.select([n]), final)
            assert_same_state(after.select([n]), last)
    assert not y[:, :1].any()
    assert not y[:, 14:].any()


def test_boundaries_win_over_a_mask_of_ones(kit, layer):
    x, packing = kit.tokens(1, 6), torch.tensor([0, 3, 6])
    ones = torch.ones(1, 6, dtype=torch.int64)
    assert torch.equal(layer(x, cu_seqlens=packing, attention_mask=ones)[0], layer(x, cu_seqlens=packing)[0])
    with pytest.raises(ValueError, match="all ones beside cu_seqlens"):
        layer(x, cu_seqlens=packing, attention_mask=1 - ones)


def test_one_document_does_not_reach_another(kit, layer):
    x, packing = kit.tokens(1, 16), torch.tensor([0, 5, 6, 13, 16])
    other = x.clone()
    other[:, :5] += 1
    y, state = layer(x, cu_seqlens=packing)
    z, after = layer(other, cu_seqlens=packing)
    assert torch.equal(y[:, 5:], z[:, 5:])
    assert not torch.equal(y[:, :5], z[:, :5])
    assert_equal_states(state.select([1, 2, 3]), after.select([1, 2, 3]))
    x.requires_grad_()
    (slope,) = torch.autograd.grad(layer(x, cu_seqlens=packing)[0][:, 6:13].sum(), x)
    assert not slope[:, :6].any()
    assert not slope[:, 13:].any()
    assert slope[:, 6:13].any(-1).all()


def test_a_row_does_not_see_its_neighbours(kit, layer):
    x = kit.tokens(3, 7)
    other = x.clone()
    other[1] *= -2
    (y, state), (z, after) = layer(x), layer(other)
    assert torch.equal(y[::2], z[::2])
    assert_equal_states(state.select([0, 2]), after.select([0, 2]))
    alone, _ = layer(x[:1])
    assert error(alone, y[:1]) <= 1e-10


def test_a_layer_keeps_nothing_between_calls(kit, layer):
    x = kit.tokens(2, 5)
    want, _ = layer(x)
    with torch.no_grad():
        layer.eval()(kit.tokens(2, 3), layer(x)[1])
    assert torch.equal(layer.train()(x)[0], want)
    assert list(layer.buffers()) == []


def test_gradients_are_right_through_output_and_state(kit, layer):
    state, held = random_leaves(layer(kit.tokens(1, 3, seed=4))[1])
    x = kit.tokens(1, 3).requires_grad_()
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def run(x, *rest):
        weights = dict(zip(names, rest[: len(names)], strict=True))
        flat, spec = pytree.tree_flatten(state)
        given = iter(rest[len(names) :])
        before = pytree.tree_unflatten([next(given) if y.requires_grad else y for y in flat], spec)
        y, after = torch.func.functional_call(layer, weights, (x, before))
        return (y, *(z for z in leaves(after) if z.requires_grad))

    assert torch.autograd.gradcheck(run, (x, *parameters, *held), fast_mode=True)


def test_the_gradient_of_pieces_is_that_of_the_whole(kit, layer):
    x = kit.tokens(1, 8).requires_grad_()
    (want,) = torch.autograd.grad(layer(x)[0].square().sum(), x)
    total, state = 0, None
    for piece in x.split(2, 1):
        y, state = layer(piece, state)
        total = total + y.square().sum()
    (got,) = torch.autograd.grad(total, x)
    assert error(got, want) <= 1e-9
