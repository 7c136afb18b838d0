"""``innerloop reproduce --check``: which claims count, and what fails it."""

from pathlib import Path

import pytest

from innerloop import experiments
from innerloop.cli import main, reproduce
from innerloop.experiments.catalogue import CLAIMS
from innerloop.report.record import Record


def record(name, verdict="passed", message=""):
    return Record(
        name=name, key="k", verdict=verdict, message=message, traceback="", result={}, seconds=1.0, quick=False,
        data="", command="", finished="", torch="", commit=None, machine={},
    )  # fmt: skip


def test_the_claims_are_those_of_the_documents():
    assert len(CLAIMS) == len(set(CLAIMS)) == 31 and CLAIMS[0] == "A1" and CLAIMS[-1] == "C6"
    assert {name for name in experiments.modules() if name[0] in "ABC"} <= set(CLAIMS)


def test_all_claims_met_in_full_is_success(capsys):
    assert reproduce._hold([], [record(name) for name in (*CLAIMS, "D1")]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (record("B6", "short", "Trained on another text."), "B6's band is missed; short: Trained on another text."),
        (record("B6", "failed", "got 3"), "B6's band is missed; failed: got 3"),
        (None, "B6's band is missed; there is no experiment of it"),
    ],
)
def test_a_claim_that_is_short_failed_or_absent_fails_in_a_line(changed, said, capsys):
    records = [record(name) for name in CLAIMS if name != "B6"] + ([] if changed is None else [changed])
    assert reproduce._hold([], records) == 1
    assert capsys.readouterr().err == f"innerloop reproduce: {said}\n"


def test_ones_own_experiments_are_held_as_well(capsys):
    assert reproduce._hold([], [*map(record, CLAIMS), record("D2", "failed", "got 2")]) == 1
    assert "D2's band is missed" in capsys.readouterr().err


def test_named_claims_are_held_alone(capsys):
    assert reproduce._hold(["a1"], [record("A1")]) == 0
    assert reproduce._hold(["A1", "A2"], [record("A1")]) == 1
    assert "A2's band is missed" in capsys.readouterr().err


def test_a_quick_run_cannot_be_checked(capsys, tmp_path):
    assert main(["reproduce", "A1", "--quick", "--check", "--out", str(tmp_path / "out")]) == 2
    assert "leave out --quick" in capsys.readouterr().err and not (tmp_path / "out").exists()


def missed(result):
    raise AssertionError("recall .91, wanted .98")


def broken(settings):
    raise OSError("out of something")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"check": missed}, "failed: recall .91, wanted .98"),
        ({"run": broken}, "failed: OSError: out of something"),
        ({"result": {"value": 1.0, "short": "Trained on another text."}}, "short: Trained on another text."),
    ],
    ids=["a missed band", "a failed experiment", "a short run"],
)
def test_the_command_fails_for(how, said, make, install, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("innerloop.experiments.catalogue.CLAIMS", ("A1", "A2"))
    words = ["reproduce", "--check", "--out", str(tmp_path)]
    install(make("A1"), make("A2", **how))
    assert main(words) == 1
    assert f"innerloop reproduce: A2's band is missed; {said}" in capsys.readouterr().err.splitlines()
    assert main(words) == 1, "also where the result is kept"
    install(make("A1"), make("A2"))
    assert main([*words, "--force"]) == 0


def test_a_quick_run_that_holds_does_not_stand_for_the_full_one(make, install, monkeypatch, tmp_path):
    monkeypatch.setattr("innerloop.experiments.catalogue.CLAIMS", ("A1",))

    def only_quick(result):
        assert result["quick"], "the full run misses"

    install(make("A1", run=lambda settings: {"value": 1.0, "quick": settings.quick}, check=only_quick, quick_seconds=1))
    assert main(["reproduce", "--quick", "--out", str(tmp_path)]) == 0
    assert main(["reproduce", "--check", "--out", str(tmp_path)]) == 1


def test_without_check_a_short_run_is_success(make, install, tmp_path):
    install(make("A1", result={"value": 1.0, "short": "Trained on another text."}))
    assert main(["reproduce", "--out", str(tmp_path)]) == 0


def test_make_reproduce_check_is_that_command_in_full():
    rule = (Path(__file__).parents[2] / "Makefile").read_text("utf-8").partition("\nreproduce-check:")[2]
    (command,) = (line for line in rule.partition("\n\n")[0].splitlines() if line.startswith("\t"))
    assert "innerloop reproduce --check" in command and "--quick" not in command
