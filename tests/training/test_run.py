"""A run that was stopped, however often and however rudely, ends as one that never was."""

import json
import os
import shutil

import pytest
import torch

from innerloop import states
from innerloop.data import ByteTokenizer
from innerloop.lm import LanguageModel
from innerloop.training import Run, find, load_model, windows_score


def test_a_run_learns_and_its_log_says_so(kit, whole):
    log = [line.split(",") for line in (whole / "log.csv").read_text().splitlines()]
    assert log[0] == ["step", "tokens", "loss", "rate", "norm", "seconds", "tokens_per_second"]
    assert [int(row[0]) for row in log[1:]] == [2, 4, 6, 8, 10, 12]
    assert [int(row[1]) for row in log[1:]] == [48 * step for step in (2, 4, 6, 8, 10, 12)]
    losses = [float(row[2]) for row in log[1:]]
    assert losses[0] == pytest.approx(5.56, abs=0.3)
    assert losses[-1] < losses[0] - 0.5
    rate = Run.open(whole).plan.options.rate_at
    assert [float(row[3]) for row in log[1:]] == [rate(step - 1) for step in range(2, 13, 2)]
    validation = [line.split(",") for line in (whole / "validation.csv").read_text().splitlines()]
    assert [row[0] for row in validation] == ["step", "4", "8", "12"]


def test_the_logged_loss_is_the_mean_of_the_updates(kit, folder):
    watch = kit.recorder()
    Run.open(folder).train(watch)
    losses = dict((step, update.loss) for step, update in watch.named("updated"))
    for step, loss in watch.named("logged"):
        assert loss == pytest.approx((losses[step - 1] + losses[step]) / 2, rel=1e-12)


def test_the_last_validation_is_that_of_the_saved_model(kit, whole):
    model, tokenizer = load_model(whole)
    tokens = Run.open(whole).tokens
    score = windows_score(model, tokenizer, tokens.validation(16, 5))
    last = (whole / "validation.csv").read_text().splitlines()[-1].split(",")
    assert [float(x) for x in last[1:]] == [score.loss, score.perplexity, score.bits_per_byte]


@pytest.mark.parametrize("stops", [[1], [5], [7], [3, 4, 11]])
def test_a_stopped_run_ends_as_one_that_never_was(stops, kit, folder, whole):
    for stop in stops:
        watch = kit.recorder(stop)
        assert Run.open(folder).train(watch, watch.stop) == stop
        assert find(folder).name == f"step-{stop:08d}"
    watch = kit.recorder()
    assert Run.open(folder).train(watch) == 12
    assert watch.named("begun") == [(stops[-1],)]
    kit.assert_same(kit.outcome(folder), kit.outcome(whole))


def test_what_came_after_the_checkpoint_is_done_again_and_logged_once(kit, folder, whole):
    class Killed(kit.recorder):
        def updated(self, step, update, seconds):
            super().updated(step, update, seconds)
            if step == 9:
                raise KeyboardInterrupt  # nothing is saved: as if the machine had gone down

    with pytest.raises(KeyboardInterrupt):
        Run.open(folder).train(Killed())
    with (folder / "log.csv").open("a") as log:
        log.write("9,half a li")
    assert Run.open(folder).step == 5
    Run.open(folder).train(kit.recorder())
    kit.assert_same(kit.outcome(folder), kit.outcome(whole))


def test_the_global_generator_and_the_threads_are_left_alone(kit, folder):
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    Run.open(folder).train(kit.recorder())
    assert torch.equal(torch.rand(3), want)
    assert torch.get_num_threads() == Run.open(folder).plan.threads


def test_a_run_takes_the_threads_it_began_with(kit, folder, monkeypatch):
    facts = json.loads((folder / "run.json").read_text())
    facts["plan"]["threads"] = 2
    (folder / "run.json").write_text(json.dumps(facts))
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    watch = kit.recorder(1)
    Run.open(folder).train(watch, watch.stop)
    assert asked == [2, torch.get_num_threads()]


def test_the_last_checkpoint_stays_until_the_next_is_whole(kit, folder, monkeypatch):
    watch = kit.recorder(5)
    Run.open(folder).train(watch, watch.stop)
    before = kit.outcome(folder)

    def full(tensors, path, metadata):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(states, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        Run.open(folder).train(kit.recorder())
    assert [path.name for path in folder.glob("*step*")] == ["step-00000005"]
    after = kit.outcome(folder)
    assert all(torch.equal(after["weights"][key], x) for key, x in before["weights"].items())


def test_one_checkpoint_is_kept_and_leftovers_go(kit, folder):
    (folder / ".step-00000003.0123456789abcdef.partial").mkdir()
    (folder / ".step-00000003.0123456789abcdef.partial" / "model.safetensors").write_text("half")
    Run.open(folder).train(kit.recorder())
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock", "log.csv", "run.json", "step-00000012", "tokenizer.json", "tokens", "validation.csv",
    ]  # fmt: skip


def test_two_processes_cannot_train_one_run(kit, folder):
    class Second(kit.recorder):
        def updated(self, step, update, seconds):
            with pytest.raises(RuntimeError, match="is being trained by another process"):
                Run.open(folder).train(kit.recorder())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Run.open(folder).train(Second())


def test_a_loss_that_is_not_finite_stops_and_leaves_the_checkpoint(kit, tmp_path):
    run = Run.prepare(tmp_path / "run", kit.plan(kit.place, rate=1e30, warmup=0, clip=0.0, save_every=1))
    with pytest.raises(FloatingPointError, match=r"the loss is .* and its gradient has norm nan"):
        run.train(kit.recorder())
    _, weights = states.read(find(tmp_path / "run") / "model.safetensors")
    assert run.step >= 1
    assert all(x.isfinite().all() for x in weights.values())


def test_a_trained_run_has_nothing_left_to_do(kit, whole):
    watch = kit.recorder()
    assert Run.open(whole).train(watch) == 12
    assert watch.told == [("begun", 12)]


def test_a_checkpoint_is_a_model(kit, whole):
    model, tokenizer = load_model(whole)
    assert not model.training
    assert isinstance(tokenizer, ByteTokenizer)
    assert model.config == Run.open(whole).plan.config
    direct = LanguageModel.load(find(whole))
    assert all(torch.equal(x, direct.state_dict()[key]) for key, x in model.state_dict().items())
    assert find(find(whole)) == find(whole)


def test_parts_of_a_batch_give_the_batchs_gradient(kit, tmp_path, folder):
    plan = kit.plan(kit.place, model={"dropout": 0.0}, part=2, batch=5)
    other = kit.plan(kit.place, model={"dropout": 0.0}, batch=5)
    logs = []
    for name, chosen in (("a", plan), ("b", other)):
        watch = kit.recorder(3)
        Run.prepare(tmp_path / name, chosen).train(watch, watch.stop)
        logs.append([(u.loss, u.norm) for _, u in watch.named("updated")])
    for (a, c), (b, d) in zip(*logs, strict=True):
        assert a == pytest.approx(b, rel=1e-5) and c == pytest.approx(d, rel=1e-4)


def test_half_precision_trains_beside_full(kit, tmp_path, whole):
    run = Run.prepare(tmp_path / "run", kit.plan(kit.place, precision="bfloat16"))
    run.train(kit.recorder())
    got, want = kit.outcome(tmp_path / "run"), kit.outcome(whole)
    assert all(x.dtype == torch.float32 for x in got["weights"].values())
    first, last = [[float(row[2]) for row in x["log"][1:]] for x in (got, want)]
    assert first != last
    assert first == pytest.approx(last, abs=0.1)


def test_pairs_are_learned_from_the_text(kit, tmp_path):
    plan = kit.plan(kit.place, model={"vocab_size": 300}, tokenizer="pairs")
    run = Run.prepare(tmp_path / "run", plan)
    assert len(run.tokenizer) == 300
    assert run.tokenizer.decode(run.tokens.piece(0, run.tokens.count)) == kit.text
    watch = kit.recorder(2)
    Run.open(tmp_path / "run").train(watch, watch.stop)
    assert len(load_model(tmp_path / "run")[1]) == 300


def test_a_board_has_every_point_once(kit, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Run.prepare(tmp_path / "run", kit.plan(kit.place, board=True))

    class Killed(kit.recorder):
        def updated(self, step, update, seconds):
            if step == 9:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Run.open(tmp_path / "run").train(Killed())
    Run.open(tmp_path / "run").train(kit.recorder())
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    log = [line.split(",") for line in (tmp_path / "run" / "log.csv").read_text().splitlines()[1:]]
    assert [point.step for point in board.Scalars("loss")] == [int(row[0]) for row in log]
    assert [point.value for point in board.Scalars("loss")] == pytest.approx([float(row[2]) for row in log])
    assert [point.step for point in board.Scalars("validation_loss")] == [4, 8, 12]


@pytest.mark.parametrize("fault", ["missing", "empty", "binary", "short", "taken", "words"])
def test_a_run_that_cannot_begin_leaves_nothing(fault, kit, tmp_path):
    place, out = tmp_path / "book.txt", tmp_path / "run"
    place.write_bytes({"empty": b"", "binary": b"abc\xff", "short": b"short"}.get(fault, kit.text.encode()))
    changed = {}
    if fault == "missing":
        place.unlink()
    if fault == "taken":
        out.mkdir()
        (out / "mine").write_text("mine")
    if fault == "words":
        changed = {"model": {"vocab_size": 20_000}, "tokenizer": "pairs"}
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(FileExistsError if fault == "taken" else ValueError) as caught:
        Run.prepare(out, kit.plan(place, **changed))
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == before


def test_an_empty_folder_may_be_there_and_stays_the_one_it_was(kit, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    Run.prepare(".", kit.plan(kit.place))
    assert sorted(os.listdir(".")) == ["run.json", "tokenizer.json", "tokens"]
    assert os.listdir(tmp_path) == ["run"]
    assert Run.open(tmp_path / "run").step == 0


def rewrite(path, **changed):
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


@pytest.mark.parametrize(
    "fault",
    ["run version", "run torn", "run fields", "checkpoint version", "checkpoint torn", "moments", "model", "weights",
     "counts", "no tokens", "a count of words", "a count missing", "another step", "numbers of another kind", "nan"],
)  # fmt: skip
def test_a_run_that_is_damaged_or_of_another_version_is_refused_in_one_line(fault, kit, whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    path = find(folder)
    counted = json.loads((path / "progress.json").read_text())["progress"]
    if fault == "run version":
        rewrite(folder / "run.json", version=99)
    elif fault == "run torn":
        (folder / "run.json").write_text('{"format')
    elif fault == "run fields":
        rewrite(folder / "run.json", plan={"place": "x"})
    elif fault == "checkpoint version":
        rewrite(path / "progress.json", version=99)
    elif fault == "checkpoint torn":
        (path / "progress.json").write_text("{")
    elif fault == "moments":
        states.write(path / "optimizer.safetensors", {"x": torch.zeros(1)}, {})
    elif fault == "model":
        kit_model = LanguageModel(kit.plan(kit.place, model={"width": 8}).config)
        kit_model.save(path)
    elif fault == "weights":
        os.truncate(path / "model.safetensors", 100)
    elif fault == "counts":
        rewrite(path / "progress.json", progress={"apples": 3})
    elif fault == "a count of words":
        rewrite(path / "progress.json", progress=counted | {"seconds": "3"})
    elif fault == "a count missing":
        rewrite(path / "progress.json", progress={k: v for k, v in counted.items() if k != "log"})
    elif fault == "another step":
        rewrite(path / "progress.json", step=True)
    elif fault == "numbers of another kind":
        rewrite(folder / "tokens" / "tokens.json", count="3")
    elif fault == "nan":
        metadata, weights = states.read(path / "model.safetensors")
        weights["norm.weight"][3] = torch.nan
        states.write(path / "model.safetensors", weights, metadata)
    elif fault == "no tokens":
        shutil.rmtree(folder / "tokens")
    with pytest.raises((ValueError, OSError)) as caught:
        Run.open(folder).train(kit.recorder())
    assert "\n" not in str(caught.value)
    if fault == "nan":
        assert "must be finite; norm.weight holds NaN" in str(caught.value)
    if "version" in fault:
        assert "must have version 1; got 99" in str(caught.value)


def test_a_folder_without_a_model_is_said(kit, folder, tmp_path):
    for place, words in ((tmp_path / "nowhere", "not there"), (folder / "run.json", "a file"),
                         (folder, "has no checkpoint yet"), (tmp_path, "holds no model")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            find(place)


def test_a_model_is_read_while_newer_checkpoints_take_the_place_of_older(kit, whole, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    real, left = LanguageModel.load, [13, 14]

    def raced(path):
        if left:
            (folder / "step-00000012" if left[0] == 13 else path).rename(folder / f"step-{left.pop(0):08d}")
        return real(path)

    monkeypatch.setattr(LanguageModel, "load", raced)
    load_model(folder)
    assert find(folder).name == "step-00000014"
    (folder / "step-00000014" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        load_model(folder)
