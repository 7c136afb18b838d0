"""The state of a layer: moved, reordered, written to a file and read again."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree

from innerloop import nn, states
from innerloop import rule as registry
from innerloop.testing import error


def assert_equal(got, want):
    assert (got.rule, list(got.windows)) == (want.rule, list(want.windows))
    for x, y in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


def test_a_saved_state_goes_on_to_the_bit(kit, layer, tmp_path):
    layer.float()
    x = kit.tokens(2, 20, dtype=torch.float32)
    _, state = layer(x[:, :10])
    want, final = layer(x[:, 10:], state)
    state.save(tmp_path / "state.safetensors")
    assert_equal(nn.LayerState.load(tmp_path / "state.safetensors"), state)
    for copied in (
        nn.LayerState.load(tmp_path / "state.safetensors"),
        state.clone(),
        state.detach(),
        copy.deepcopy(state.detach()),
        state.to(dtype=torch.float64, device="cpu").to(dtype=torch.float32),
        pytree.tree_unflatten(*reversed(pytree.tree_flatten(state))),
    ):
        got, after = layer(x[:, 10:], copied)
        assert torch.equal(got, want)
        assert_equal(after.detach(), final.detach())


def test_rows_go_where_they_are_told_with_all_that_is_theirs(kit, layer):
    x = kit.tokens(3, 6)
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[1, :4] = False
    _, state = layer(x, attention_mask=mask)
    more = kit.tokens(3, 2, seed=5)
    want, _ = layer(more, state)
    index = [2, 0, 0]
    got, _ = layer(more[index], state.reorder(index))
    assert error(got, want[index]) <= 1e-10
    got, _ = layer(more[[1]], state.select([1]))
    assert error(got, want[[1]]) <= 1e-10
    for x, y in zip(pytree.tree_leaves(state.reorder(index)), pytree.tree_leaves(state), strict=True):
        assert torch.equal(x, y[index])


def test_a_state_counts_its_bytes_and_cuts_its_history(kit, layer):
    _, state = layer(kit.tokens(2, 6))
    assert state.nbytes == sum(x.numel() * x.element_size() for x in pytree.tree_leaves(state))
    assert not any(x.requires_grad for x in pytree.tree_leaves(state.detach()))
    assert any(x.requires_grad for x in pytree.tree_leaves(state.clone()))
    pointers = {x.data_ptr() for x in pytree.tree_leaves(state) if x.numel()}
    assert not pointers & {x.data_ptr() for x in pytree.tree_leaves(state.clone())}


def test_a_state_does_not_keep_the_inputs_alive(kit, plain):
    layer = kit.build(plain)
    with torch.no_grad():
        _, state = layer(kit.tokens(2, 50))
    for window in state.windows.values():
        assert window.untyped_storage().nbytes() == window.numel() * window.element_size()


def test_cropping_goes_back_exactly_or_says_that_it_cannot(kit, layer):
    x = kit.tokens(2, 8)
    _, state = layer(x)
    if layer.rule != "softmax_attention":
        with pytest.raises(ValueError, match="keep a clone"):
            state.crop(5)
        return
    if layer.window:
        with pytest.raises(ValueError, match="keep a clone"):
            state.crop(5)
        _, state = layer(x[:, : layer.window - 1])
        assert state.crop(0).position.tolist() == [0, 0]
        return
    want, _ = layer(x[:, :3], layer(x[:, :5])[1])
    got, after = layer(x[:, :3], state.crop(5))
    assert error(got, want) <= 1e-10
    assert after.position.tolist() == [8, 8]


def test_files_that_are_not_a_layers_state_say_so(kit, tmp_path):
    path = tmp_path / "state.safetensors"
    _, state = kit.build("GatedDeltaNet")(kit.tokens(2, 3))
    state.save(path)
    tensors = load_file(path)
    metadata = {"format": "innerloop layer state", "version": "1", "rule": "gated_delta_rule", "tensors": "[]"}
    for wrong, message in (
        (metadata | {"format": "pt"}, "some other safetensors file"),
        (metadata | {"version": "7"}, "version 1; got 7"),
        (metadata, "must hold"),
        (metadata | {"rule": "no_such_rule"}, "no_such_rule"),
        ({"format": "innerloop layer state", "version": "1"}, "rule must be|unknown rule|no rule"),
    ):
        save_file(tensors, path, wrong)
        with pytest.raises(ValueError, match=message):
            nn.LayerState.load(path)
    names = '["' + '", "'.join(tensors) + '"]'
    save_file(tensors | {"position": torch.zeros(3, dtype=torch.int64)}, path, metadata | {"tensors": names})
    with pytest.raises(ValueError, match="does not fit together"):
        nn.LayerState.load(path)
    path.write_bytes(b"no state at all")
    with pytest.raises(ValueError, match="whole safetensors file"):
        nn.LayerState.load(path)
    with pytest.raises(FileNotFoundError):
        nn.LayerState.load(tmp_path / "none")


def test_a_foreign_state_is_refused(kit, layer):
    x = kit.tokens(2, 4)
    _, state = layer(x)
    with pytest.raises(TypeError, match="LayerState"):
        layer(x, state.memory)
    with pytest.raises(ValueError, match="N=3 rows"):
        layer(kit.tokens(3, 4), state)
    other = nn.LayerState("no_rule", state.memory, state.windows, state.position)
    with pytest.raises(ValueError, match="must be one of"):
        layer(x, other)
    if state.windows:
        with pytest.raises(ValueError, match="window"):
            layer(x, nn.LayerState(state.rule, state.memory, {}, state.position))


def test_inputs_that_do_not_fit_say_what_was_wanted(kit, layer):
    x = kit.tokens(2, 4)
    with pytest.raises(ValueError, match=r"\[B, T, D\] with D=12"):
        layer(x[..., :5])
    with pytest.raises(TypeError, match="x must have dtype"):
        layer(x.long())
    with pytest.raises(TypeError, match="attention_mask"):
        layer(x, attention_mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match="attention_mask"):
        layer(x, attention_mask=torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="B must be 1"):
        layer(x, cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(TypeError, match="cu_seqlens"):
        layer(x[:1], cu_seqlens=[0, 4])
    with pytest.raises(ValueError, match="cu_seqlens must rise"):
        layer(x[:1], cu_seqlens=torch.tensor([0, 3, 9]))


def test_a_recipes_state_says_what_it_cannot(kit, tmp_path):
    layer = nn.RecipeLayer(kit.width, registry.get("delta_rule").recipe, 2)
    _, state = layer(kit.tokens(2, 3).float())
    assert state.nbytes == sum(x.numel() * x.element_size() for x in pytree.tree_leaves(state) if x is not None) > 0
    with pytest.raises(ValueError, match=r"use torch\.save"):
        state.save(tmp_path / "state.safetensors")
    with pytest.raises(ValueError, match="keep a clone"):
        state.crop(2)
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=False).position.tolist() == [3, 3]


def test_what_is_for_an_ops_state_points_from_a_layers_to_its_own(kit):
    _, state = kit.build("GatedDeltaNet")(kit.tokens(2, 3))
    for wrong in (lambda: states.nbytes(state), lambda: states.save("none", "gated_delta_rule", state)):
        with pytest.raises(TypeError, match=r"state\.save\(path\)"):
            wrong()
