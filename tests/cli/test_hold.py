"""``innerloop reproduce --check``: which claims count, and what fails it."""

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


def test_the_command_ends_in_what_the_check_says(tmp_path, capsys, monkeypatch):
    held = []
    monkeypatch.setattr(reproduce, "_hold", lambda names, records: held.append([r.name for r in records]) or 1)
    words = ["reproduce", "B1", "--out", str(tmp_path)]
    assert main(words) == 0 and held == []
    assert main([*words, "--check"]) == 1 and held == [["B1"]]
