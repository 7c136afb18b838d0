"""Probes: whose layers they take, how they train and judge, and what they keep."""

import json
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from innerloop.cli import main
from innerloop.data.tasks import TASKS, Parity, SelectiveCopying, task
from innerloop.nn import RecipeLayer
from innerloop.probe import Board, Budget, Plan, ProbeModel, Row, contender, judge, markdown, summarised, train, trial

TINY = Budget(steps=3, batch=4, width=8, heads=2, judged=16)
WORDS = ["--steps", "2", "--batch", "4", "--width", "8", "--heads", "2", "--budget", "judged=8"]


def row(layer="kda", seed=0, **changed):
    numbers = {
        "scores": {"1": 0.9, "4": 0.5}, "last": {"1": 0.8, "4": 0.4}, "parameters": 7, "state_bytes": 64, "steps": 10,
        "seconds": 1.0, "losses": [3.0, 2.0],
    }  # fmt: skip
    return Row(layer=layer, seed=seed, **{**numbers, **changed})


class Oracle(nn.Module):
    """Answers parity rightly, and from the ninth bit on always the same."""

    def forward(self, inputs):
        labels = inputs.cumsum(1) % 2
        labels[:, 8:] = 0
        return nn.functional.one_hot(labels, 2).float()


def test_a_judge_tells_right_from_wrong_and_long_from_short():
    short = judge(Oracle(), Parity(bits=8), 500)
    assert short.score == short.last == 1
    longer = judge(Oracle(), Parity(bits=16), 2000)
    assert longer.score == pytest.approx(0.75, abs=0.01) and longer.last == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize("name", TASKS)
def test_every_task_trains_a_layer(name):
    made = task(name)
    found = trial(contender("delta_rule", 8, 2), made, TINY, 0)
    assert len(found.losses) == found.steps == 3 and found.state_bytes is not None and found.state_bytes > 0
    assert found.scores.keys() == found.last.keys() == {"1"} and found.scores["1"] <= 1


def test_a_trial_is_its_seed_and_leaves_the_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = trial(contender("mamba2", 8, 2), Parity(), TINY, 1)
    assert torch.equal(before, torch.get_rng_state())
    again, other = (trial(contender("mamba2", 8, 2), Parity(), TINY, seed) for seed in (1, 2))
    assert first.losses == again.losses != other.losses and first.scores == again.scores
    untrained = replace(TINY, steps=0)
    drawn = {trial(contender("mamba2", 8, 2), Parity(), untrained, seed).scores["1"] for seed in range(4)}
    assert len(drawn) > 1, "what is judged is the same for all: the weights must differ"


def test_training_learns_and_ends_when_it_has():
    budget = Budget(steps=400, batch=32, width=16, judged=64, rate=1e-2)
    torch.manual_seed(0)
    made = SelectiveCopying(words=3, count=1, noise=0)
    model = ProbeModel(made, [Gathered()], 16)
    done = train(model, [made], budget, torch.Generator().manual_seed(0))
    assert len(done.losses) < 400 and done.stage == 0
    assert judge(model, made, 200).score == 1


class Gathered(nn.Module):
    """Adds the token before: no memory that must be learned."""

    def forward(self, x):
        return torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)


def test_stages_follow_one_another_once_mastered():
    stages = [Parity(bits=1), Parity(bits=40)]
    torch.manual_seed(0)
    model = ProbeModel(stages[-1], [Gathered()], 16)
    done = train(model, stages, Budget(steps=60, batch=32, rate=1e-2, width=16), torch.Generator().manual_seed(0))
    assert done.stage == 1 and len(done.losses) == 60
    stuck = train(model, [Parity(bits=40), stages[0]], Budget(steps=5, width=16), torch.Generator().manual_seed(0))
    assert stuck.stage == 0 and len(stuck.losses) == 5


def test_a_loss_that_is_not_finite_is_told():
    class Bad(nn.Module):
        def forward(self, x):
            return x / 0

    model = ProbeModel(Parity(), [Bad()], 8)
    with pytest.raises(FloatingPointError, match="at update 1"):
        train(model, [Parity()], TINY, torch.Generator().manual_seed(0))


def test_layers_of_a_file_are_taken(own):
    made = {name: contender(f"{own}:{name}", 8, 2).make()[0] for name in ("Mean", "Recurrent", "made", "step")}
    assert made["Recurrent"].heads == 2 and isinstance(made["step"], RecipeLayer)
    found = trial(contender(f"{own}:Mean", 8, 2), Parity(), TINY, 0)
    assert found.state_bytes is None and found.layer == f"{own}:Mean"
    assert trial(contender(f"{own}:Recurrent", 8, 2), Parity(), TINY, 0).state_bytes == 4 * 8


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Missing", "must define Missing; it does not"),
        ("Narrow", "must map [B, T, D] = [2, 3, 8] to the same shape; got [2, 3, 7]"),
        ("Broken", "must make a layer of width=8; it raises RuntimeError: no such width"),
        ("Silent", "must map [B, T, D] to the same shape; it raises TypeError: it returns NoneType"),
        ("number", "must be a module's class, a function that returns a module, or a recipe; got int"),
    ],
)
def test_what_is_no_layer_is_refused_in_a_line(own, name, said):
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        contender(f"{own}:{name}", 8, 2)
    assert "\n" not in str(caught.value)


def test_files_that_do_not_run_are_refused_with_their_line(tmp_path):
    path = tmp_path / "bad.py"
    with pytest.raises(ValueError, match=r"bad.py must be a Python file; No such file"):
        contender(f"{path}:X", 8)
    path.write_text("import math\nmath.nothing\n")
    with pytest.raises(ValueError, match=r"bad.py must run; line 2 raises AttributeError"):
        contender(f"{path}:X", 8)
    path.write_text("def x(:\n")
    with pytest.raises(ValueError, match=r"bad.py must run; line 1 raises SyntaxError"):
        contender(f"{path}:X", 8)
    with pytest.raises(ValueError, match=r"must be FILE.py:NAME"):
        contender(str(path), 8)
    with pytest.raises(ValueError, match=r"Did you mean 'delta_rule'"):
        contender("delta_rul", 8)


def test_a_changed_file_is_read_again(own):
    first = contender(f"{own}:Mean", 8)
    own.write_text(own.read_text() + "\n# changed\n")
    assert contender(f"{own}:Mean", 8).key != first.key


def test_a_summary_is_mean_and_spread_over_seeds():
    found = summarised([row(seed=n, last={"1": 1.0, "4": x}) for n, x in enumerate((0.4, 0.5, 0.6))])
    assert (found.last["4"], found.last_spreads["4"]) == (pytest.approx(0.5), pytest.approx(0.1))
    table = markdown([found, summarised([row("mamba2", last={"1": 0.5, "4": 0.7})])], Parity())
    lines = [line.split(" | ")[:4] for line in table.splitlines()[2:4]]
    assert lines[0] == ["| mamba2", "0.900", "0.500", "0.700"]
    assert lines[1] == ["| kda", "0.900 ± 0.000", "1.000 ± 0.000", "0.500 ± 0.100"]
    assert table.endswith("parity, 16 tokens; chance 0.500.\n")


def test_rows_are_kept_and_run_again_when_torn_or_of_another_file(own, tmp_path):
    board = Board.at(tmp_path / "board", Plan(Parity(), TINY))
    chosen = contender(f"{own}:made", 8)
    first, fresh = board.row(chosen, 0)
    assert fresh and board.row(chosen, 0) == (first, False)
    board.file(chosen.name, 0).write_text("{")
    assert board.row(chosen, 0)[1]
    own.write_text(own.read_text() + "\n# changed\n")
    assert board.row(contender(f"{own}:made", 8), 0)[1]
    with pytest.raises(ValueError, match=r"must hold a probe like this one; it differs in sizes"):
        Board.at(tmp_path / "board", Plan(Parity(bits=4), TINY))
    with pytest.raises(FileExistsError, match="it holds something else"):
        Board.at(tmp_path, Plan(Parity(), TINY))


@pytest.mark.parametrize("wrong", [{"steps": -1}, {"batch": 0}, {"rate": 0.0}, {"width": 2.0}, {"clip": float("nan")}])
def test_a_budget_that_is_none_is_refused(wrong):
    with pytest.raises((ValueError, TypeError), match=f"^{next(iter(wrong))} must be"):
        Budget(**wrong)


def test_the_command_writes_a_table_and_a_figure_and_resumes(own, tmp_path, capsys):
    words = ["probe", "parity", "--layer", "delta_rule(allow_neg_eigval=true)", "--layer", f"{own}:Mean",
             "--longer", "2", "--seeds", "2", "--out", str(tmp_path / "out"), *WORDS]  # fmt: skip
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith((tmp_path / "out" / "table.md").read_text()) and "chance 0.500" in out
    assert (tmp_path / "out" / "figure.svg").read_text().startswith("<svg")
    stored = json.loads((tmp_path / "out" / "table.json").read_text())
    assert [x["seeds"] for x in stored] == [2, 2] and stored[0]["last"].keys() == {"1", "2"}
    assert main(words) == 0
    assert capsys.readouterr().err.count("kept from an earlier run") == 4
    assert main([*words, "--steps", "3"]) == 2
    assert "it differs in steps" in capsys.readouterr().err


def test_a_single_length_is_drawn_by_seeds(tmp_path):
    assert main(["probe", "recall", "--layer", "mamba2", "--seeds", "1", "--out", str(tmp_path / "out"), *WORDS]) == 0
    assert "score (dashed: chance)" in (tmp_path / "out" / "figure.svg").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "TASK must be named"),
        (["parity"], "--layer must name at least one layer"),
        (["chess", "--layer", "kda"], "TASK must be one of overwrite"),
        (["parity", "--layer", "kd"], "pattern 'kd', character 1"),
        (["parity", "--layer", "nothing.py:X"], "nothing.py must be a Python file"),
        (["parity", "--layer", "kda", "--set", "bit=3"], "--set must name one of bits"),
        (["parity", "--layer", "kda", "--set", "bits=0"], "parity's bits must be"),
        (["parity", "--layer", "kda", "--longer", "0"], "--longer must be at least 1"),
        (["recall", "--layer", "kda", "--longer", "2"], "recall has no longer form"),
        (["parity", "--layer", "kda", "--seeds", "0"], "--seeds must be at least 1"),
        (["parity", "--layer", "kda", "--steps", "-1"], "steps must be at least 0; got -1"),
        (["parity", "--layer", "kda", "--heads", "3"], "a kda layer cannot be made"),
    ],
)
def test_wrong_words_get_one_line_and_leave_nothing(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["probe", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("innerloop probe: ") and said in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_list_names_every_task(capsys):
    assert main(["probe", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^{name} ", out, re.MULTILINE) for name in TASKS) and "chance" in out
