"""What is done to a state between calls changes nothing of what it remembers."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from innerloop import rule as registry
from innerloop import rules, states
from innerloop.testing import assert_close, draw_call, outcome

NAMES = [module.RULE.name for module in rules.ALL]
MERGED = [name for name in NAMES if not registry.get(name).grows]


def made(name, **sizes):
    """Return a state and a call that goes on from it."""
    _, state = draw_call(name, T=9, **sizes).run()
    after = draw_call(name, T=6, seed=4, **sizes)
    after.state = state
    return state, after


def same(rule, got, want):
    for x, y in zip(rule.state_tensors(got), rule.state_tensors(want), strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_goes_on_to_the_bit_from_a_file(name, tmp_path):
    for dtype in (torch.float64, torch.float32):
        state, after = made(name, dtype=dtype)
        states.save(tmp_path / "state.safetensors", name, state)
        loaded = states.load(tmp_path / "state.safetensors", name)
        assert type(loaded) is type(state)
        same(after.rule, loaded, state)
        want = outcome(after.rule, after.run())
        after.state = loaded
        for key, x in outcome(after.rule, after.run()).items():
            assert torch.equal(x, want[key]), key
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


@pytest.mark.parametrize("name", NAMES)
def test_reordered_rows_go_on_as_the_rows_they_came_from(name):
    state, after = made(name, B=3)
    fixed = {gate.name for gate in after.rule.gates if "B" not in gate.axes}
    index = torch.tensor([2, 0, 0])
    want = outcome(after.rule, after.run())
    moved = after.map(lambda key, x: x if key in fixed else x[index])
    moved.state = states.reorder(state, index)
    got = outcome(after.rule, moved.run())
    for key, x in got.items():
        assert torch.equal(x, want[key][index]), key
    moved = after.map(lambda key, x: x if key in fixed else x[1:2])
    for rows in ([1], torch.tensor([False, True, False])):
        moved.state = states.select(state, rows)
        alone = {key: x[1:2] for key, x in want.items()}
        assert_close(outcome(after.rule, moved.run()), alone, torch.float64)  # another batch size rounds otherwise


@pytest.mark.parametrize("name", NAMES)
def test_copies_keep_structure_values_and_history(name):
    call = draw_call(name, T=5).tracked()
    _, state = call.run()
    rule = call.rule
    for function in (states.clone, states.detach, lambda x: states.select(x, [0, 1]), states.to):
        copy = function(state)
        assert type(copy) is type(state)
        same(rule, copy, state)
    copied, cut = rule.state_tensors(states.clone(state)), rule.state_tensors(states.detach(state))
    for x, y, z in zip(rule.state_tensors(state), copied, cut, strict=True):
        assert x.data_ptr() != y.data_ptr()
        assert x.requires_grad == y.requires_grad == x.is_floating_point()
        assert not z.requires_grad
    half = states.to(state, dtype=torch.bfloat16)
    for x, y in zip(rule.state_tensors(half), rule.state_tensors(state), strict=True):
        assert x.dtype == (torch.bfloat16 if y.is_floating_point() else torch.int64)
    assert states.nbytes(state) == sum(x.numel() * x.element_size() for x in rule.state_tensors(state)) > 0


def test_nothing_is_the_empty_memory():
    for function in (states.clone, states.detach, states.to, lambda x: states.reorder(x, [5])):
        assert function(None) is None
    assert states.nbytes(None) == 0


@pytest.mark.parametrize("name", MERGED)
def test_a_memory_that_merges_its_tokens_refuses_to_forget_some(name):
    state, _ = made(name)
    with pytest.raises(ValueError, match=f"^{name} cannot forget single tokens; keep a clone to go back to$"):
        states.crop(name, state, 3)


@pytest.mark.parametrize("name", NAMES)
def test_going_back_to_a_clone_takes_rejected_tokens_back(name):
    state, rejected = made(name)
    kept = states.clone(state)
    rejected.run()
    other = draw_call(name, T=4, seed=8)
    other.state = kept
    got = outcome(other.rule, other.run())
    other.state = made(name)[0]
    for key, x in outcome(other.rule, other.run()).items():
        assert torch.equal(got[key], x), key


def test_attention_forgets_its_last_pairs():
    call = draw_call("softmax_attention", B=3, T=9)
    _, state = call.run()
    for lengths in (5, torch.tensor(0), torch.tensor([5, 0, 9])):
        cropped = states.crop("softmax_attention", state, lengths)
        assert cropped.keys.shape[1] == cropped.values.shape[1] == int(torch.as_tensor(lengths).max())
        assert cropped.keys.untyped_storage().data_ptr() != state.keys.untyped_storage().data_ptr()
        after = draw_call("softmax_attention", B=3, T=4, seed=2)
        for row, length in enumerate(torch.as_tensor(lengths).expand(3).tolist()):
            one = after.map(lambda _, x, row=row: x[row : row + 1])
            one.state = call.map(lambda _, x, row=row: x[row : row + 1]).tokens(0, length).run()[1]
            after.state = cropped
            torch.testing.assert_close(after.run()[0][row : row + 1], one.run()[0])
    assert state.lengths.tolist() == [9, 9, 9]


def test_a_crop_never_keeps_more_than_there_is():
    _, state = draw_call("softmax_attention", T=9).run()
    shorter = states.crop("softmax_attention", state, torch.tensor([4, 9]))
    for length in (10, -1, torch.tensor([9, 10])):
        with pytest.raises(ValueError, match=r"must lie between 0 and what each row holds, \[9, 9\]"):
            states.crop("softmax_attention", state, length)
    with pytest.raises(ValueError, match=r"what each row holds, \[4, 9\]; got \[5, 5\]"):
        states.crop("softmax_attention", shorter, 5)
    with pytest.raises(TypeError, match="length must be a whole number"):
        states.crop("softmax_attention", state, 2.5)
    with pytest.raises(ValueError, match=r"must be one number or have shape \[N=2\]"):
        states.crop("softmax_attention", state, torch.tensor([1, 2, 3]))


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        ([0, 2], ValueError, r"must lie between 0 and N-1=1; got \[0, 2\]"),
        ([-1, 0], ValueError, "must lie between 0"),
        ([0.0, 1.0], TypeError, "must hold whole numbers or truths; got float32"),
        (torch.zeros(2, 1, dtype=torch.int64), ValueError, r"must have one axis; got shape \[2, 1\]"),
        ([True, False, True], ValueError, r"must hold N=2 truths; got shape \[3\]"),
    ],
)
def test_rows_that_are_not_there_are_named(rows, error, words):
    for function in (states.select, states.reorder):
        with pytest.raises(error, match=words):
            function(torch.zeros(2, 3), rows)


def test_a_reordering_names_every_row():
    with pytest.raises(ValueError, match="index must name one row for each of N=2; got 1"):
        states.reorder(torch.zeros(2, 3), [0])
    assert states.select(torch.zeros(2, 3), []).shape == (0, 3)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "state.safetensors"
    states.save(path, "momentum_delta_rule", made("momentum_delta_rule")[0])
    return path


def rewritten(path, tensors=None, **changed):
    with safe_open(path, framework="pt") as old:
        metadata = old.metadata()
    save_file(load_file(path) if tensors is None else tensors, path, {**metadata, **changed})


def refusal(path, rule="momentum_delta_rule"):
    with pytest.raises(ValueError, match=r"must|fit") as refused:
        states.load(path, rule)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith(str(path))
    return str(refused.value).removeprefix(f"{path} ")


def test_another_version_is_refused(file):
    rewritten(file, version="2")
    assert refusal(file).startswith("must have version 1; got 2.")


def test_another_rule_or_structure_is_refused(file):
    assert refusal(file, "delta_rule") == "must hold a state of delta_rule; got momentum_delta_rule"
    rewritten(file, states='{"S": ["G", "V", "K"]}')
    assert refusal(file).startswith('must have the structure {"S": ["G", "K", "V"], "U": ["G", "K", "V"]}; got')


def test_a_foreign_file_is_refused(file, tmp_path):
    save_file({"S": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert refusal(tmp_path / "model.safetensors").startswith("must be a file that states.save wrote")
    for content in (b"", b"PK", torch.arange(90.0).numpy().tobytes(), b"{}" * 40):
        file.write_bytes(content)
        assert refusal(file).startswith("must be a whole safetensors file")


def test_every_truncation_is_refused(file):
    whole = file.read_bytes()
    for length in range(0, len(whole), 37):
        file.write_bytes(whole[:length])
        assert refusal(file).startswith("must be a whole safetensors file")


def test_tensors_that_do_not_fit_together_are_refused(file):
    whole = load_file(file)
    rewritten(file, {"S": whole["S"]})
    assert refusal(file) == "must hold S, U; got S"
    rewritten(file, {"S": whole["S"], "U": whole["U"][:, :1].contiguous()})
    assert "U must have shape [N, G, K, V]" in refusal(file)
    rewritten(file, {"S": whole["S"], "U": whole["U"].long()})
    assert "U must hold floats" in refusal(file)


def test_a_missing_file_is_the_systems_to_report(tmp_path):
    with pytest.raises(FileNotFoundError):
        states.load(tmp_path / "none", "delta_rule")
    with pytest.raises(FileNotFoundError):
        states.save(tmp_path / "none" / "state", "delta_rule", torch.zeros(1, 1, 2, 2))


def test_only_the_rules_own_state_is_written(tmp_path):
    for state in (None, (torch.zeros(1, 1, 2, 2),) * 2, [1.0]):
        with pytest.raises(TypeError, match="the state of delta_rule must be a tensor; got"):
            states.save(tmp_path / "state", "delta_rule", state)
    with pytest.raises(ValueError, match=r"the state's S must have shape \[N, G, K, V\]"):
        states.save(tmp_path / "state", "delta_rule", torch.zeros(1, 2, 2))
    with pytest.raises(TypeError, match=r"must be MomentumState\(S, U\); got Tensor"):
        states.save(tmp_path / "state", "momentum_delta_rule", torch.zeros(1, 1, 2, 2))
    assert not list(tmp_path.iterdir())


def test_views_and_states_that_need_gradients_are_written(tmp_path):
    state = torch.randn(2, 3, 4, 5).transpose(2, 3)[:1].expand(4, -1, -1, -1).requires_grad_()
    states.save(tmp_path / "state", "delta_rule", state)
    assert torch.equal(states.load(tmp_path / "state", "delta_rule"), state)


KILLED = """
import os, signal, sys, torch
from innerloop import states
where = {where!r}
setattr(os, where, lambda *words: os.kill(os.getpid(), signal.SIGKILL))
states.save({path!r}, "delta_rule", torch.ones(1, 2, 64, 64))
"""


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_write_that_is_killed_leaves_the_old_file(where, tmp_path):
    path = tmp_path / "state.safetensors"
    old = torch.zeros(1, 2, 64, 64)
    states.save(path, "delta_rule", old)
    program = KILLED.format(where=where, path=str(path))
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert torch.equal(states.load(path, "delta_rule"), old)


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "state.safetensors"
    states.save(path, "delta_rule", torch.zeros(1, 1, 2, 2))

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        states.save(path, "delta_rule", torch.ones(1, 1, 2, 2))
    assert [x.name for x in tmp_path.iterdir()] == [path.name]
    assert not states.load(path, "delta_rule").any()


def test_the_same_tensors_make_the_same_file(tmp_path):
    x = {"ä\"\\\n": torch.arange(3.0), "b": torch.ones(2, dtype=torch.int64)}
    metadata = {f"key {i}": f"é \"{i}\" \\ \n\x7f" for i in range(6)}
    found = set()
    for _ in range(5):
        states.write(tmp_path / "file", x, metadata)
        found.add((tmp_path / "file").read_bytes())
    assert len(found) == 1
    read, tensors = states.read(tmp_path / "file")
    assert read == metadata and tensors.keys() == x.keys()
    assert all(torch.equal(tensors[name], x[name]) for name in x)


def test_a_state_survives_pickle_and_deepcopy():
    import copy
    import pickle

    for name in NAMES:
        state, after = made(name)
        for twin in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
            assert type(twin) is type(state)
            same(after.rule, twin, state)


def test_a_loaded_state_is_no_map_of_its_file(tmp_path):
    file = tmp_path / "state.safetensors"
    states.save(file, "kda", torch.ones(1, 8, 64, 64))
    loaded = states.load(file, "kda")
    file.write_bytes(b"\0" * file.stat().st_size)
    assert torch.equal(loaded, torch.ones(1, 8, 64, 64))


@pytest.mark.skipif(os.name != "posix", reason="speaks of permissions and links")
def test_a_file_has_the_permissions_of_any_other_and_a_link_stays_one(tmp_path):
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    before = os.umask(0o077)
    try:
        states.save(link, "delta_rule", torch.ones(1, 1, 2, 2))
    finally:
        os.umask(before)
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o600
    assert torch.equal(states.load(target, "delta_rule"), torch.ones(1, 1, 2, 2))


def test_what_is_no_state_is_refused_in_one_line(tmp_path):
    S = torch.ones(2, 1, 2, 2)
    _, kept = draw_call("softmax_attention", T=3).run()
    for error, match, act in (
        (TypeError, "state must be a tensor, a NamedTuple of tensors, or None; got list", lambda: states.clone([1, 2])),
        (TypeError, "got str", lambda: states.nbytes("abc")),
        (TypeError, "got dict", lambda: states.detach({"S": S})),
        (TypeError, "rows must be a tensor or a list of whole numbers; got str", lambda: states.select(S, "01")),
        (TypeError, "index must be a tensor or a list of whole numbers; got NoneType", lambda: states.reorder(S, None)),
        (TypeError, "length must be a whole number", lambda: states.crop("softmax_attention", kept, None)),
        (TypeError, "dtype must be of floats; got torch.int64", lambda: states.to(S, dtype=torch.int64)),
        (FileNotFoundError, "nowhere", lambda: states.save(tmp_path / "nowhere" / "x", "delta_rule", S)),
        (ValueError, "meta tensor", lambda: states.save(tmp_path / "x", "delta_rule", S.to("meta"))),
        (
            ValueError,
            r"lengths must lie in \[0, S=3\]; got \[103",
            lambda: states.save(tmp_path / "x", "softmax_attention", kept._replace(lengths=kept.lengths + 100)),
        ),
    ):
        with pytest.raises(error, match=match) as caught:
            act()
        assert "\n" not in str(caught.value)
        assert list(tmp_path.iterdir()) == []
