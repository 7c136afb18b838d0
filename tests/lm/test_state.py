"""The state of a model: moved, reordered, cropped, written to a file and read again."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree

from innerloop.lm import State
from innerloop.testing import error


def assert_equal(got, want):
    for x, y in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


@torch.no_grad()
def test_a_saved_state_goes_on_to_the_bit(kit, pattern, tmp_path):
    model, tokens = kit.build(pattern, torch.float32), kit.words(2, 14)
    _, state = model(tokens[:, :9])
    want, final = model(tokens[:, 9:], state)
    state.save(tmp_path / "state.safetensors")
    torch.save(pytree.tree_leaves(state), tmp_path / "leaves.pt")
    leaves = torch.load(tmp_path / "leaves.pt", weights_only=True)
    for copied in (
        State.load(tmp_path / "state.safetensors"),
        state.clone(),
        copy.deepcopy(state),
        state.to(dtype=torch.float64, device="cpu").to(dtype=torch.float32),
        pytree.tree_unflatten(leaves, pytree.tree_structure(state)),
    ):
        assert_equal(copied, state)
        got, after = model(tokens[:, 9:], copied)
        assert torch.equal(got, want)
        assert_equal(after, final)


@torch.no_grad()
def test_rows_go_where_they_are_told_in_every_layer(kit, pattern):
    model, tokens, more = kit.build(pattern), kit.words(3, 6), kit.words(3, 2, seed=5)
    _, state = model(tokens)
    want, _ = model(more, state)
    index = [2, 0, 0]
    for x, y in zip(pytree.tree_leaves(state.reorder(index)), pytree.tree_leaves(state), strict=True):
        assert torch.equal(x, y[index])
    assert error(model(more[index], state.reorder(index))[0], want[index]) <= 1e-10
    assert error(model(more[[1]], state.select([1]))[0], want[[1]]) <= 1e-10


def test_cropping_goes_back_exactly_or_says_that_it_cannot(kit):
    model, tokens = kit.build("softmax_attention"), kit.words(2, 8)
    _, state = model(tokens)
    want, _ = model(tokens[:, :3], model(tokens[:, :5])[1])
    assert error(model(tokens[:, :3], state.crop(5))[0], want) <= 1e-10
    for pattern in ("hybrid", "window"):
        with pytest.raises(ValueError, match="keep a clone"):
            kit.build(pattern)(tokens)[1].crop(5)


def test_a_clone_goes_back_where_no_crop_can(kit):
    model, tokens = kit.build("hybrid"), kit.words(1, 8)
    _, state = model(tokens[:, :5])
    kept = state.clone()
    model(tokens[:, 5:], state)
    assert torch.equal(model(tokens[:, 5:], kept)[0], model(tokens[:, 5:], state)[0])


def test_a_state_counts_its_bytes_and_cuts_its_history(kit):
    _, state = kit.build("hybrid")(kit.words(2, 6))
    assert state.nbytes == sum(x.numel() * x.element_size() for x in pytree.tree_leaves(state))
    assert any(x.requires_grad for x in pytree.tree_leaves(state))
    assert not any(x.requires_grad for x in pytree.tree_leaves(state.detach()))
    assert state.position.tolist() == [6, 6]


@torch.no_grad()
@pytest.mark.parametrize("pattern", ["gated_delta_rule", "rwkv7", "mesa", "window"])
def test_a_state_takes_no_more_room_the_longer_it_lives(kit, pattern):
    model, state = kit.build(pattern), None
    sizes = []
    for token in kit.words(1, 12)[0]:
        _, state = model(token[None, None], state)
        sizes.append(state.nbytes)
    assert len(set(sizes[2:])) == 1
    assert model(kit.words(1, 100))[1].nbytes == sizes[-1]


def test_files_that_are_not_a_models_state_say_so(kit, tmp_path):
    path = tmp_path / "state.safetensors"
    _, state = kit.build("kda")(kit.words(2, 3))
    state.layers[0].save(path)
    with pytest.raises(ValueError, match=r"file that State\.save wrote"):
        State.load(path)
    state.save(path)
    tensors = load_file(path)
    good = {"format": "innerloop model state", "version": "1"}
    one = '[{"rule": "kda", "tensors": ["memory.S", "windows.query", "windows.key", "windows.value"]}]'
    for tensors_, metadata, message in (
        (tensors, good | {"version": "7"}, "version 1; got 7"),
        (tensors, good, "does not fit together"),
        (tensors, good | {"layers": "[]"}, "does not fit together"),
        (tensors, good | {"layers": '[{"rule": "no"}]'}, "does not fit together"),
        (tensors, good | {"layers": "{"}, "does not fit together"),
        (tensors, good | {"layers": one}, "holds tensors of no layer"),
        (tensors | {"1.position": torch.zeros(3, dtype=torch.int64)}, good | {"layers": one}, "does not fit together"),
    ):
        save_file(tensors_, path, metadata)
        with pytest.raises(ValueError, match=message):
            State.load(path)
    path.write_bytes(b"no state at all")
    with pytest.raises(ValueError, match="whole safetensors file"):
        State.load(path)
    with pytest.raises(FileNotFoundError):
        State.load(tmp_path / "none")
