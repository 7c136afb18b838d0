"""What the runner keeps, what it runs again, and what it does when something breaks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from innerloop.experiments import processes, runner
from innerloop.experiments.experiment import Settings
from innerloop.report.record import Record


class Silent:
    """Remembers what it was told."""

    def __init__(self):
        self.fractions, self.fresh = [], []

    def started(self, experiment):
        pass

    def advanced(self, name, fraction):
        self.fractions.append(fraction)

    def finished(self, record, *, fresh):
        self.fresh.append(fresh)


@pytest.fixture
def run(tmp_path, install):
    def run(*chosen, settings=None, watch=None, code="code", force=False):
        def key(experiment, quick):
            return f"{code} {experiment.name} {quick}"

        install(*chosen)
        watch = watch or Silent()
        return list(processes.run_all(chosen, settings or Settings(), tmp_path, watch=watch, force=force, key=key))

    return run


def refuse(result):
    raise AssertionError("got 1, wanted more")  # pytest would add to the message of an assert statement


def stumble(settings):
    raise OSError("the machine is out of something")


def test_a_second_run_shows_the_first_ones_result(make, run):
    (first,) = run(make())
    (second,) = run(make())
    assert make.ran == ["A1"]
    assert second == first
    assert first.verdict == "passed"


def test_force_runs_again(make, run):
    run(make())
    run(make(), force=True)
    assert make.ran == ["A1", "A1"]


def test_changed_code_runs_again(make, run):
    run(make())
    run(make(), code="other code")
    assert make.ran == ["A1", "A1"]


def test_quick_and_full_results_live_side_by_side(make, run):
    both = make(quick_seconds=0.1)
    (full,) = run(both)
    (quick,) = run(both, settings=Settings(quick=True))
    assert (full.verdict, quick.verdict) == ("passed", "short")
    run(both)
    run(both, settings=Settings(quick=True))
    assert make.ran == ["A1", "A1"]


def test_without_a_quick_variant_quick_and_full_share_a_result(make, run):
    run(make(), settings=Settings(quick=True))
    (record,) = run(make())
    assert make.ran == ["A1"]
    assert record.verdict == "passed"
    assert record.command == "innerloop reproduce A1"


def test_an_experiment_without_a_quick_variant_is_told_to_run_in_full(make, run):
    seen = []
    run(make(run=lambda settings: seen.append(settings.quick) or {"value": 1.0}), settings=Settings(quick=True))
    assert seen == [False]


def test_a_failed_check_does_not_stop_the_next_experiment(make, run):
    records = run(make("A1", check=refuse), make("A2"))
    assert [record.verdict for record in records] == ["failed", "passed"]
    assert records[0].message == "got 1, wanted more"
    assert records[0].traceback == ""
    assert records[0].result == {"value": 1.0}


def test_an_exception_does_not_stop_the_next_experiment_and_leaves_its_traceback(make, run, tmp_path):
    records = run(make("A1", run=stumble), make("A2"))
    assert [record.verdict for record in records] == ["failed", "passed"]
    kept = json.loads((tmp_path / "A1.json").read_text())
    assert kept["message"] == "OSError: the machine is out of something"
    assert "in stumble" in kept["traceback"]


def test_what_raised_runs_again_but_a_failed_check_is_kept(make, run):
    run(make("A1", run=stumble), make("A2", check=refuse))
    run(make("A1"), make("A2", check=refuse))
    assert make.ran == ["A1", "A2", "A1"]


def test_a_result_that_json_cannot_hold_is_a_failure(make, run):
    (record,) = run(make(result={"value": {1.0}}))
    assert record.verdict == "failed"
    assert record.message.startswith("TypeError")


def test_the_check_sees_what_is_read_back_later(make, run):
    seen = []
    run(make(result={"value": (1, 2), "by_size": {3: math.inf}}, check=seen.append))
    assert seen == [{"value": [1, 2], "by_size": {"3": math.inf}}]


def test_a_result_that_says_it_is_short_is_short_until_other_data_are_named(make, run, tmp_path, monkeypatch):
    monkeypatch.delenv("INNERLOOP_DATA", raising=False)
    short = make(result={"value": 1.0, "short": "Another text."})
    (record,) = run(short)
    assert (record.verdict, record.message) == ("short", "Another text.")
    run(short)
    assert make.ran == ["A1"]
    run(short, settings=Settings(data=tmp_path))
    assert make.ran == ["A1", "A1"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[1, 2]",
        lambda text: text.replace('"format": 1', '"format": 99'),
        lambda text: text.replace('"name": "A1"', '"name": "A2"'),
        lambda text: text.replace('"seconds":', '"minutes":'),
        lambda text: text.replace('"quick": false', '"quick": "no"'),
        lambda text: text.replace('"verdict": "passed"', '"verdict": "splendid"'),
        lambda text: "\udcff" + text,  # written as a byte that is not UTF-8
    ],
)
def test_a_torn_or_foreign_result_is_not_trusted(make, run, tmp_path, damage):
    run(make())
    file = tmp_path / "A1.json"
    damaged = damage(file.read_text())
    assert damaged != file.read_text()
    file.write_text(damaged, errors="surrogateescape")
    (record,) = run(make())
    assert make.ran == ["A1", "A1"]
    assert Record.read(file) == record


def test_an_interrupt_leaves_the_finished_results_and_no_half_written_file(make, run, tmp_path):
    def interrupt(settings):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(make("A1"), make("A2", run=interrupt), make("A3"))
    assert [path.name for path in tmp_path.iterdir()] == ["A1.json"]
    run(make("A1"), make("A2"), make("A3"))
    assert make.ran == ["A1", "A2", "A2", "A3"]


def test_a_write_that_fails_leaves_the_old_result(make, run, tmp_path, monkeypatch):
    run(make())
    before = (tmp_path / "A1.json").read_text()

    def refuse_to_rename(source, target):
        raise OSError("no room")

    monkeypatch.setattr("os.replace", refuse_to_rename)
    with pytest.raises(OSError, match="no room"):
        run(make(), force=True)
    assert (tmp_path / "A1.json").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["A1.json"]


def test_progress_reaches_the_watch(make, run):
    watch = Silent()
    run(make(), watch=watch)
    run(make(), watch=watch)
    assert watch.fractions == [0.5]
    assert watch.fresh == [True, False]


def test_a_record_says_where_and_how_it_was_made(make, run):
    (record,) = run(make())
    assert record.machine["cores"] >= 1
    assert record.machine["cpu"]
    assert record.torch[0].isdigit()
    assert record.seconds >= 0
    assert record.finished.endswith("+00:00")


def test_an_experiment_that_cannot_be_imported_fails_when_run(install, make, run, monkeypatch):
    def broken(name):
        raise ImportError("no such module")

    monkeypatch.setattr("innerloop.experiments.load", broken)
    record = runner.run_one(runner.load("A1"), Settings(), "key")
    assert (record.verdict, record.message) == ("failed", "ImportError: no such module")
    assert 'raise ImportError("no such module")' in record.traceback


def test_what_a_run_keeps_for_the_next_is_its_own_codes_and_goes_with_the_parts(tmp_path):
    one, other = (runner.Parts(tmp_path / "A1.parts", key) for key in ("a" * 64, "b" * 64))
    one.kept("weights").write_text("kept")
    assert runner.Parts(tmp_path / "A1.parts", "a" * 64).kept("weights").read_text() == "kept"
    assert not other.kept("weights").exists()
    one.remove()
    assert not list(tmp_path.iterdir())


class TestSourcesKey:
    """Equal keys must mean equal numbers."""

    @pytest.fixture
    def package(self, tmp_path) -> Path:
        for name in ("ops.py", "rules/delta.py", "cli/main.py", "report/page.py", "experiments/child.py"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("x = 1\n")
        return tmp_path

    def key(self, package: Path) -> str:
        return runner.sources_key.__wrapped__(package)

    @pytest.mark.parametrize("name", ["ops.py", "rules/delta.py"])
    def test_it_follows_the_code_that_makes_numbers(self, package, name):
        before = self.key(package)
        (package / name).write_text("x = 2\n")
        assert self.key(package) != before

    def test_it_follows_new_and_renamed_files(self, package):
        keys = {self.key(package)}
        (package / "new.py").write_text("")
        keys.add(self.key(package))
        (package / "new.py").rename(package / "renamed.py")
        keys.add(self.key(package))
        assert len(keys) == 3

    @pytest.mark.parametrize("name", ["cli/main.py", "report/page.py", "experiments/child.py"])
    def test_it_ignores_the_code_that_only_starts_and_shows(self, package, name):
        before = self.key(package)
        (package / name).write_text("x = 2\n")
        assert self.key(package) == before

    def test_it_depends_on_name_and_length(self, make):
        keys = {
            runner.code_key(make("A1"), False),
            runner.code_key(make("A1"), True),
            runner.code_key(make("A2"), False),
        }
        assert len(keys) == 3
