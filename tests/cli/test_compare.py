"""The scoreboard: rows that are kept, means and spreads, and what is refused."""

import json
import math

import pytest
import torch

from innerloop.cli import main
from innerloop.data import pydoc_topics
from innerloop.training import scoreboard
from innerloop.training.scoreboard import Row, markdown, places, summarised

SMALL = ["--width", "16", "--heads", "2", "--depth", "1", "--length", "16", "--batch", "3", "--threads", "1"]


@pytest.fixture
def book(tmp_path):
    (tmp_path / "book.txt").write_text(pydoc_topics()[:4000], "utf-8")
    return str(tmp_path / "book.txt")


def row(pattern="kda", seed=0, **changed):
    numbers = {
        "perplexity": 10.0, "bits_per_character": 2.0, "loss": math.log(10), "parameters": 7, "seconds": 1.0,
        "seconds_per_epoch": 3.0, "state_bytes": 64, "decode_tokens_per_second": 100.0, "losses": [3.0, 2.0],
    }  # fmt: skip
    return Row(pattern=pattern, seed=seed, **{**numbers, **changed})


def test_rows_are_kept_and_only_missing_ones_run(book, tmp_path, capsys, monkeypatch):
    ran = []
    real = scoreboard.train_row

    def counted(config, options, *rest):
        ran.append((config.pattern, options.seed))
        if len(ran) == 3:
            raise KeyboardInterrupt
        return real(config, options, *rest)

    monkeypatch.setattr(scoreboard, "train_row", counted)
    words = ["compare", book, "--out", str(tmp_path / "out"), "--layers", "mamba2", "attention+kda", "--seeds", "2",
             "--steps", "2", *SMALL]  # fmt: skip
    assert main(words) == 130
    assert "2 of 4 rows are kept" in capsys.readouterr().err
    assert main(words) == 0
    assert ran == [("mamba2", 0), ("mamba2", 1), ("attention+kda", 0), ("attention+kda", 0), ("attention+kda", 1)]
    out, err = capsys.readouterr()
    assert err.count("kept from an earlier run") == 2
    assert out.startswith((tmp_path / "out" / "table.md").read_text())
    assert (tmp_path / "out" / "figure.svg").read_text().startswith("<svg")
    stored = {x["pattern"]: x for x in json.loads((tmp_path / "out" / "table.json").read_text())}
    assert {x["seeds"] for x in stored.values()} == {2}
    for pattern, summary in stored.items():
        assert 100 < summary["perplexity"] < 400 and summary["perplexity_spread"] > 0
        assert summary["state_bytes"] > 0 and summary["decode_tokens_per_second"] > 0, pattern
    assert stored["attention+kda"]["parameters"] > stored["mamba2"]["parameters"]


def test_a_row_is_the_same_whether_or_not_others_ran_before(book, tmp_path, capsys):
    found = []
    for name, layers in (("a", ["kda"]), ("b", ["mamba2", "kda"])):
        out = tmp_path / name
        words = ["compare", book, "--out", str(out), "--seeds", "1", "--steps", "2", *SMALL]
        assert main([*words, "--layers", *layers]) == 0
        (path,) = (out / "rows").glob("kda*")
        found.append(json.loads(path.read_text()))
    assert found[0]["losses"] == found[1]["losses"] and found[0]["loss"] == found[1]["loss"]


def test_layers_and_threads_of_later_commands_join_the_same_table(book, tmp_path, capsys, monkeypatch):
    used = []
    real = scoreboard.train_row

    def watched(*all_of_it):
        used.append(torch.get_num_threads())
        return real(*all_of_it)

    monkeypatch.setattr(scoreboard, "train_row", watched)
    before = torch.get_num_threads()
    out = tmp_path / "out"
    words = ["compare", book, "--out", str(out), "--seeds", "1", "--steps", "1", *SMALL, "--layers"]
    assert main([*words, "mamba2", "--threads", str(before + 1)]) == 0
    assert main([*words, "kda"]) == 0
    assert used == [before + 1] * 2 and torch.get_num_threads() == before
    assert [x["pattern"] for x in json.loads((out / "table.json").read_text())] == ["mamba2", "kda"]
    table = (out / "table.md").read_text()
    assert "| mamba2 |" in table and "| kda |" in table


@pytest.mark.parametrize("layer", ["gated_delta_rule", "longhorn", "attention"])
def test_a_row_that_diverges_is_one_line_and_stops_no_other(layer, book, tmp_path, capsys):
    words = ["compare", book, "--out", str(tmp_path / "out"), "--seeds", "1", "--steps", "4", *SMALL, "--rate", "1e30"]
    assert main([*words, "--layers", layer, "kda", "--train-set", "warmup=0", "--train-set", "clip=0"]) == 1
    err = capsys.readouterr().err
    assert err.count(f"{layer}, seed 0: ") == err.count("kda, seed 0: ") == 1 and "Traceback" not in err
    assert "2 rows did not stay finite; try a lower --rate" in err


def test_a_summary_is_mean_and_spread_over_seeds():
    rows = [row(perplexity=x, bits_per_character=x / 5, seed=n) for n, x in enumerate((9.0, 10.0, 11.0))]
    summary = summarised(rows)
    assert (summary.perplexity, summary.perplexity_spread) == (pytest.approx(10), pytest.approx(1))
    assert (summary.bits_per_character, summary.bits_spread) == (pytest.approx(2), pytest.approx(0.2))
    table = markdown([summary, summarised([row("mamba2", perplexity=9.5)])])
    lines = [line.split(" | ")[:2] for line in table.splitlines()[2:]]
    assert lines == [["| mamba2", "9.50"], ["| kda", "10.00 ± 1.00"]]


def test_places_go_by_seeds_that_do_not_overlap():
    found = {"kda": (5.0, 6.0), "mamba2": (6.5, 8.0), "gla": (7.5, 9.0), "retention": (8.5, 9.0), "mesa": (9.5, 9.6)}
    summaries = [summarised([row(name, perplexity=x, seed=n) for n, x in enumerate(xs)]) for name, xs in found.items()]
    assert places(summaries) == [(1, 1), (2, 3), (2, 4), (3, 4), (5, 5)]
    assert places(summaries[::-1]) == places(summaries)[::-1]
    table = markdown(summaries[::-1]).splitlines()
    assert [line.split(" | ")[-1] for line in table[:7]] == [
        "place |", "---: |", "1 |", "2 to 3 |", "2 to 4 |", "3 to 4 |", "5 |",
    ]  # fmt: skip
    assert "all of whose seeds are better" in table[-1]
    assert "place" not in markdown([*summaries, summarised([row("gdn2")])])  # one seed overlaps with nothing
    assert "place" not in markdown(summaries[:1])


def test_a_row_that_is_torn_or_of_another_key_runs_again(tmp_path):
    path = tmp_path / "row.json"
    scoreboard.write_row(path, row(), "key")
    assert scoreboard.read_row(path, "key") == row()
    assert scoreboard.read_row(path, "other") is None
    for text in ("{", "[]", path.read_text().replace('"version": 1', '"version": 2'),
                 path.read_text().replace('"loss"', '"lost"')):  # fmt: skip
        path.write_text(text)
        assert scoreboard.read_row(path, "key") is None
    assert scoreboard.read_row(tmp_path / "none", "key") is None


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["nowhere.txt", "--out", "out"], "there is no nowhere.txt"),
        (["BOOK", "--out", "out", "--layers", "kda", "mamba3"], "Did you mean 'mamba2'?"),
        (["BOOK", "--out", "out", "--layers", "2*"], "pattern '2*'"),
        (["BOOK", "--out", "out", "--seeds", "0"], "--seeds must be at least 1"),
        (["BOOK", "--out", "out", "--length", "3000"], "must hold out a window of 3001 tokens"),
        (["BOOK", "--out", "out", "--length", "9000"], "must have at least length + 1 = 9001 tokens"),
        (["BOOK", "--out", "BOOK"], "must be empty or not exist yet"),
    ],
)
def test_wrong_input_is_one_line(words, wanted, book, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *(book if word == "BOOK" else word for word in words)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("innerloop compare: ") and wanted in err
    assert [path.name for path in tmp_path.iterdir()] == ["book.txt"]


def test_another_budget_needs_another_folder(book, tmp_path, capsys):
    words = ["compare", book, "--out", str(tmp_path / "out"), "--layers", "mamba2", "--seeds", "1", *SMALL, "--steps"]
    assert main([*words, "1"]) == 0
    capsys.readouterr()
    assert main([*words, "2"]) == 2
    assert "it differs in options. Name another folder" in capsys.readouterr().err
    assert main(["train", "--resume", str(tmp_path / "out")]) == 2
    assert "is a comparison" in capsys.readouterr().err
