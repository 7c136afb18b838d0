"""train, evaluate and generate as a user meets them: what they print, refuse, and leave behind."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from innerloop import states
from innerloop.cli import main
from innerloop.data import pydoc_topics
from innerloop.training import Run

SMALL = ["--width", "16", "--heads", "2", "--length", "16", "--batch", "3", "--threads", "1"]
MORE = ["--log-every", "2", "--save-every", "5", "--evaluate-every", "10"]


def called(words, capsys):
    """Run a command; return its exit code, output and errors."""
    try:
        code = main([str(word) for word in words])
    except SystemExit as stop:
        code = stop.code
    return (code, *capsys.readouterr())


def refused(words, capsys):
    """Run what must be refused; return the one line that says why."""
    code, out, err = called(words, capsys)
    assert (code, out) == (2, "")
    assert err.endswith("\n") and err.count("\n") == 1, err
    return err


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(pydoc_topics()[:6000], "utf-8")
    return path


@pytest.fixture(scope="module")
def trained(book, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", str(book), "--out", str(folder), "--steps", "10", *SMALL, *MORE]) == 0
    return folder


def test_training_says_how_it_goes_and_how_to_read_on(book, tmp_path, capsys):
    code, out, err = called(["train", book, "--out", tmp_path / "run", "--steps", "10", *SMALL, *MORE], capsys)
    assert code == 0
    assert out == f"Trained: step 10. Read on with: innerloop generate {tmp_path / 'run'} --prompt 'Once'\n"
    lines = err.splitlines()
    assert len(lines) == 6
    assert all(re.fullmatch(r"step \d+/10  loss \d\.\d{4}  [\d,]+ tokens/s  .* left", line) for line in lines[:5])
    assert re.fullmatch(r"step 10: validation loss .*, perplexity .*, .* bits a byte", lines[5])


def test_every_option_reaches_the_plan(book, tmp_path, capsys):
    words = ["train", book, "--out", tmp_path / "run", "--pattern", "mamba2+attention", "--depth", "4", "--steps", "1",
             "--tokenizer", "pairs", "--vocabulary", "300", "--hold-out", "0.3", "--rate", "0.01", "--seed", "7",
             "--part", "2", "--stride", "8", "--warmup", "0", "--precision", "bfloat16", "--set", "tied=false",
             "--set", 'layer_options={"mamba2": {"groups": 2}}', "--train-set", "clip=0.5",
             "--train-set", "beta2=0.99", *SMALL]  # fmt: skip
    assert called(words, capsys)[0] == 0
    plan = Run.open(tmp_path / "run").plan
    config, options = plan.config, plan.options
    assert [entry.rule for entry in config.layers] == ["mamba2", "softmax_attention"] * 2
    assert (config.vocab_size, config.width, config.heads, config.tied) == (300, 16, 2, False)
    assert config.layer_options == {"mamba2": {"groups": 2}}
    assert (options.rate, options.seed, options.part, options.stride, options.warmup) == (0.01, 7, 2, 8, 0)
    assert (options.precision, options.clip, options.beta2, options.length) == ("bfloat16", 0.5, 0.99, 16)
    assert (plan.hold_out, plan.tokenizer, plan.threads) == (0.3, "pairs", 1)


def test_a_run_is_judged_on_what_it_held_out_or_on_another_text(trained, book, tmp_path, capsys):
    code, out, _ = called(["evaluate", trained, "--json"], capsys)
    assert code == 0
    held = json.loads(out)
    count = int(len(book.read_bytes()) * 0.1)
    assert held["tokens"] == held["bytes"] == count - 1
    (tmp_path / "held.txt").write_bytes(book.read_bytes()[-count:])
    for model in (trained, trained / "step-00000010"):
        code, out, _ = called(["evaluate", model, tmp_path / "held.txt", "--json", "--piece", "50"], capsys)
        assert json.loads(out) == pytest.approx(held, rel=1e-5)
    code, out, _ = called(["evaluate", trained, "--window", "16"], capsys)
    assert [line.rpartition("  ")[0].strip() for line in out.splitlines()] == [
        "tokens", "bytes", "characters", "loss", "perplexity", "bits per byte", "bits per character",
    ]  # fmt: skip


def test_what_is_written_begins_with_the_prompt_and_repeats_with_its_seed(trained, capsys):
    words = ["generate", trained, "--prompt", "Onc é", "--tokens", "30", "--seed"]
    first, again, other = (called([*words, seed], capsys)[1] for seed in ("1", "1", "2"))
    assert first == again != other
    assert first.startswith("Onc é") and first.endswith("\n")
    assert called(["generate", trained, "--tokens", "0"], capsys) == (0, "\n", "")
    greedy = [called([*words[:-1], "--temperature", "0", "--seed", seed], capsys)[1] for seed in ("1", "2")]
    assert greedy[0] == greedy[1]


def test_what_is_written_comes_piece_by_piece(trained, monkeypatch):
    pieces = []

    class Out:
        def write(self, text):
            pieces.append(text)

        def flush(self):
            pieces.append(None)

    monkeypatch.setattr(sys, "stdout", Out())
    assert main(["generate", str(trained), "--prompt", "A", "--tokens", "20", "--seed", "3"]) == 0
    assert pieces[0] == "A" and pieces.count(None) > 10


def test_a_prompt_is_read_from_the_input(trained, capsys, monkeypatch):
    class In:
        buffer = io.BytesIO("déjà".encode())

    monkeypatch.setattr(sys, "stdin", In())
    assert called(["generate", trained, "--prompt", "-", "--tokens", "1"], capsys)[1].startswith("déjà")
    In.buffer = io.BytesIO(b"\xff")
    assert "the input must be UTF-8 text" in refused(["generate", trained, "--prompt", "-"], capsys)


WRONG = {
    "nothing": (["train"], "TEXT must be named"),
    "no out": (["train", "book.txt"], "--out must name the folder"),
    "missing": (["train", "nowhere.txt", "--out", "run"], "there is no nowhere.txt"),
    "empty": (["train", "empty.txt", "--out", "run"], "data must hold text; empty.txt is empty"),
    "binary": (["train", "binary.bin", "--out", "run"], "binary.bin must be UTF-8 text; byte 4 is not"),
    "short": (["train", "short.txt", "--out", "run"], "data must have at least length + 1 = 257 tokens"),
    "validation": (["train", "book.txt", "--out", "run", "--validation", "nowhere"], "there is no nowhere"),
    "scant": (["train", "book.txt", "--out", "run", "--validation", "short.txt"], "hold out a window of 257"),
    "layer": (["train", "book.txt", "--out", "run", "--pattern", "gated_delta"], "wanted the name of a layer"),
    "pattern": (["train", "book.txt", "--out", "run", "--pattern", "3*(mamba2"], "wanted '+' or ')'"),
    "heads": (["train", "book.txt", "--out", "run", "--heads", "3", "--width", "16"], "heads"),
    "set": (["train", "book.txt", "--out", "run", "--set", "wdith=3"], "--set must name one of vocab_size, width"),
    "set form": (["train", "book.txt", "--out", "run", "--set", "width"], "--set must be NAME=VALUE; got width"),
    "steps": (["train", "book.txt", "--out", "run", "--steps", "0"], "steps must be at least 1; got 0"),
    "word": (["train", "book.txt", "--out", "run", "--steps", "x"], "--help"),
    "threads": (["train", "book.txt", "--out", "run", "--threads", "0"], "threads must be a whole number"),
    "many threads": (["train", "book.txt", "--out", "run", "--threads", "100000"], "at least 1 and at most 1024"),
    "long seed": (["train", "book.txt", "--out", "run", "--seed", str(1 << 64)], "seed must be below 2^64"),
    "seed": (["generate", "RUN", "--seed", str(1 << 64)], "--seed must be at least 0 and below 2^64"),
    "vocabulary": (["train", "book.txt", "--out", "run", "--vocabulary", "300"], "needs --tokenizer pairs"),
    "column": (["train", "rows.jsonl", "--out", "run"], "must have a column text; it has body"),
    "taken": (["train", "book.txt", "--out", "full"], "must be empty or not exist yet"),
    "deep": (["train", "empty.txt", "--out", "a/b/c"], "empty.txt is empty"),
    "there": (["train", "empty.txt", "--out", "mine"], "empty.txt is empty"),
    "here": (["train", "short.txt", "--out", "."], "must be empty or not exist yet"),
    "below a file": (["train", "book.txt", "--out", "book.txt/run"], "book.txt"),
    "resume": (["train", "--resume", "nowhere"], "nowhere is not there"),
    "resume other": (["train", "--resume", "full"], "has none"),
    "resume and more": (["train", "--resume", "full", "--steps", "5"], "leave out steps"),
    "no model": (["evaluate", "nowhere"], "not there"),
    "a file": (["generate", "book.txt"], "a file"),
    "no run": (["generate", "full"], "holds no model"),
    "evaluate missing": (["evaluate", "RUN", "nowhere.txt"], "there is no nowhere.txt"),
    "evaluate empty": (["evaluate", "RUN", "empty.txt"], "empty.txt is empty"),
    "evaluate one": (["evaluate", "RUN", "one.txt"], "at least two tokens"),
    "evaluate binary": (["evaluate", "RUN", "binary.bin"], "must be UTF-8 text"),
    "half a pair": (["evaluate", "RUN", "half.jsonl"], "half.jsonl line 1 must hold Unicode text in its column text"),
    "half a prompt": (["generate", "RUN", "--prompt", "a\udcff"], "character 1 is half of a surrogate pair, U+DCFF"),
    "piece": (["evaluate", "RUN", "--piece", "0"], "--piece must be at least 1"),
    "temperature": (["generate", "RUN", "--temperature", "-1"], "temperature must be"),
    "top": (["generate", "RUN", "--top-p", "2"], "top_p must lie"),
    "tokens": (["generate", "RUN", "--tokens", "-1"], "--tokens must be at least 0"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_input_is_one_line_and_leaves_nothing(fault, trained, book, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_bytes(book.read_bytes())
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "one.txt").write_text("a")
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "binary.bin").write_bytes(b"PK\x03\x04\xff\xfe\x00" * 50)
    (tmp_path / "rows.jsonl").write_text('{"body": "x"}\n')
    (tmp_path / "half.jsonl").write_text('{"text": "\\ud800 x"}\n')
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "mine").mkdir()
    before = sorted((entry.name, entry.inode()) for entry in os.scandir(tmp_path))
    words, wanted = WRONG[fault]
    error = refused([str(trained) if word == "RUN" else word for word in words], capsys)
    assert error.startswith(f"innerloop {words[0]}: ")
    assert wanted in error
    assert sorted((entry.name, entry.inode()) for entry in os.scandir(tmp_path)) == before
    assert (os.listdir(tmp_path / "full"), os.listdir(tmp_path / "mine")) == (["mine"], [])


@pytest.mark.parametrize("file", ["run.json", "tokens/tokens.json", "step-00000010/progress.json",
                                  "step-00000010/config.json"])  # fmt: skip
def test_a_file_of_another_version_is_one_line(file, trained, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    path = folder / file
    text = path.read_text()
    stored = json.loads(text)
    place = stored["innerloop"] if "innerloop" in stored else stored
    place["version"] = 99
    path.write_text(json.dumps(stored))
    error = refused(["train", "--resume", folder], capsys)
    assert file.rpartition("/")[2] in error
    assert "must have version 1; got 99" in error


def test_training_that_diverges_says_what_is_kept(book, tmp_path, capsys):
    words = ["train", book, "--out", tmp_path / "run", "--steps", "20", "--rate", "1e30", "--warmup", "0",
             "--train-set", "clip=0", *SMALL, "--save-every", "1"]  # fmt: skip
    code, _, err = called(words, capsys)
    assert code == 1
    assert re.fullmatch(
        r"innerloop train: step (\d+): the loss is .*; the checkpoint of step \d+ is kept in .*/run, and --resume "
        r"would end here again. Train anew with a lower --rate, once that folder is removed or with another --out",
        err.splitlines()[-1],
    )


def test_an_interrupt_saves_and_says_how_to_go_on(book, tmp_path):
    words = ["train", str(book), "--out", str(tmp_path / "run"), "--steps", "100000", *SMALL, "--log-every", "1"]
    process = subprocess.Popen([sys.executable, "-m", "innerloop", *words], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("step 1/")
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    found = re.fullmatch(
        rf"Interrupted: saved at step (\d+) of 100000\. Go on with: innerloop train --resume {tmp_path / 'run'}",
        err.splitlines()[-1],
    )
    assert found, err
    assert Run.open(tmp_path / "run").step == int(found[1]) >= 1
    last = (tmp_path / "run" / "log.csv").read_text().splitlines()[-1]
    assert last.split(",")[0] == found[1]
    assert "Traceback" not in err


@pytest.fixture
def copied(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "copy")
    return tmp_path / "copy"


def test_weights_and_tokens_that_are_none_are_one_line(copied, capsys):
    tokens = copied / "tokens" / "tokens.bin"
    tokens.write_bytes(b"\xff" * tokens.stat().st_size)
    assert "must be below 259; got 65535" in refused(["evaluate", copied], capsys)
    weights = copied / "step-00000010" / "model.safetensors"
    metadata, found = states.read(weights)
    found["embedding.weight"][:] = torch.inf
    states.write(weights, found, metadata)
    for command in ("evaluate", "generate"):
        assert "must be finite; embedding.weight holds NaN or inf" in refused([command, copied], capsys)


def test_what_an_output_cannot_show_is_written_as_an_escape(trained, monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "ascii", write_through=True))
    assert main(["generate", str(trained), "--prompt", "Thé", "--tokens", "3", "--seed", "1"]) == 0
    assert shown.getvalue().startswith(b"Th\\xe9")


def test_what_is_missing_is_said_and_a_folder_of_any_name_is_one_word(trained, tmp_path, capsys):
    folder = tmp_path / "my\nrun's"
    shutil.copytree(trained, folder)
    words = ["train", "--resume", folder]
    assert rf"generate $'{tmp_path}/my\nrun\'s' --prompt" in called(words, capsys)[1]
    (folder / "step-00000010" / "optimizer.safetensors").unlink()
    error = refused(words, capsys)
    assert "Make room" not in error
    assert r"my\nrun's/step-00000010/optimizer.safetensors: No such file" in error
    assert "not whole" in error


def test_an_option_given_twice_or_in_vain_is_refused(trained, book, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"text": "x"}\n')
    train, out = ["train", book, "--out", tmp_path / "new"], ["--out", tmp_path / "new"]
    for words, wanted in (
        (["train", "--resume", trained, "--seed", "0", "--warmup", "0", "--hold-out", "0"],
         "leave out hold_out, seed, warmup"),
        ([*train, "--tokenizer", "pairs", "--vocabulary", "0"], "--vocabulary must be at least 259"),
        ([*train, "--pattern", "kda", "--set", "pattern=mamba2"], "--pattern and --set pattern say the same"),
        ([*train, "--steps", "3", "--train-set", "steps=4"], "--steps and --train-set steps say the same"),
        ([*train, "--set", "dropout=0", "--set", "dropout=0.1"], "got dropout twice"),
        ([*train, "--validation", book, "--hold-out", "0.2"], "--validation takes the place of"),
        ([*train, "--column", "body"], "--column is for records"),
        (["train", "", *out], "must name a file or folder; got an empty word"),
        (["train", book, "--out", ""], "must name a file or folder; got an empty word"),
        (["evaluate", trained, "--column", "body"], "--column is for TEXT"),
        (["generate", ""], "must name a file or folder; got an empty word"),
        (["compare", book, *out, "--set", "pattern=kda"], "--set pattern has no meaning"),
        (["compare", book, *out, "--train-set", "seed=3"], "--train-set seed has no meaning"),
        (["compare", book, *out, "--width", "8", "--set", "width=16"], "--width and --set width say the same"),
        (["probe", "parity", "--layer", "kda", *out, "--steps", "3", "--budget", "steps=4"], "say the same"),
        (["inspect", "delta_rule", "--gate", "beta=1", "--gate", "beta=0", *out], "got beta twice"),
        (["inspect", trained, "--text", "x", "--seed", "0", *out], "--seed is for a rule"),
    ):  # fmt: skip
        assert wanted in refused(words, capsys), words
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def test_the_warm_up_is_a_part_of_the_steps_however_they_are_given(book, tmp_path, capsys):
    words = ["train", book, "--out", tmp_path / "run", "--train-set", "steps=40", "--rate", "1e30", "--train-set",
             "clip=0", *SMALL]  # fmt: skip
    assert called(words, capsys)[0] == 1
    assert Run.open(tmp_path / "run").plan.options.warmup == 2
