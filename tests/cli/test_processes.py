"""Experiments beside each other: the same numbers however many, what dies harms no other, what is stopped goes on."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from io import StringIO
from pathlib import Path

import pytest

from innerloop.cli import main
from innerloop.cli.progress import Progress
from innerloop.experiments import processes, runner
from innerloop.experiments.experiment import Settings
from innerloop.report.record import Record

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("fake_child", HERE / "fake_child.py")
assert _spec is not None and _spec.loader is not None
fake_child = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake_child)
COMMAND = "import fake_child, sys; from innerloop.cli import main; fake_child.install(); sys.exit(main(sys.argv[1:]))"


class Told:
    """Remembers who began and who ended, in order."""

    def __init__(self):
        self.began, self.events = [], []

    def started(self, experiment):
        self.began.append(experiment.name)
        self.events.append(1)

    def advanced(self, name, fraction):
        assert 0 <= fraction <= 1

    def finished(self, record, *, fresh):
        self.events.append(-1)

    def most(self):
        return max(sum(self.events[: i + 1]) for i in range(len(self.events)))


class Stub:
    """Stands for a process that takes a tenth of a second."""

    def __init__(self, order, tell):
        record = runner.record_of(fake_child.load(order["name"]), Settings(), order["key"], message="stub")
        new = {"record": json.loads(json.dumps(vars(record)))}
        threading.Timer(0.1, lambda: (tell(new), tell(0))).start()

    def stop(self):
        pass


@pytest.fixture
def fakes(monkeypatch):
    """Let children find the experiments of ``fake_child``."""
    monkeypatch.setattr(processes.Child, "module", "fake_child")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))


def run(names, folder, jobs, **more):
    told = Told()
    chosen = [fake_child.load(name) for name in names]

    def key(experiment, quick):
        return f"key {experiment.name}"

    records = list(processes.run_all(chosen, Settings(), folder, watch=told, jobs=jobs, key=key, **more))
    return {record.name: record for record in records}, told


def test_the_longest_begins_first_and_what_measures_time_before_all(tmp_path):
    _, told = run(["A1", "A2", "A4", "C1"], tmp_path, 2, start=Stub)
    assert told.began == ["A4", "A2", "C1", "A1"]


@pytest.mark.parametrize(("jobs", "most"), [(1, 1), (2, 2), (9, 3)])
def test_no_more_run_than_were_asked_for(tmp_path, jobs, most):
    _, told = run(["A1", "A2", "A3"], tmp_path, jobs, start=Stub)
    assert told.most() == most


def test_what_measures_time_runs_with_nothing_beside_it(tmp_path):
    _, told = run(["A1", "A2", "A3", "A4"], tmp_path, 2, start=Stub)
    assert told.events[:2] == [1, -1] and told.most() == 2


def test_processes_run_beside_each_other(fakes, tmp_path):
    records, _ = run(["A1", "A2"], tmp_path, 2)
    one, other = (records[name].result for name in ("A1", "A2"))
    assert one["begin"] < other["end"] and other["begin"] < one["end"]


def test_each_has_one_thread_and_the_same_bits_however_many_run(fakes, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    found = []
    for jobs in (1, 2):
        (tmp_path / str(jobs)).mkdir()
        records, _ = run(["B1", "C1"], tmp_path / str(jobs), jobs)
        assert records["B1"].verdict == "passed", records["B1"].message
        found.append(records["B1"].result)
    assert found[0] == found[1] and found[0]["threads"] == 1


def test_a_process_that_dies_fails_and_stops_no_other(fakes, tmp_path):
    records, _ = run(["B2", "B3", "C1"], tmp_path, 2)
    assert [records[name].verdict for name in ("B2", "B3", "C1")] == ["failed", "failed", "passed"]
    assert "exit code 3" in records["B2"].message
    assert "SIGKILL" in records["B3"].message and "memory" in records["B3"].message
    assert Record.read(tmp_path / "B3.json") == records["B3"]
    _, told = run(["B3", "C1"], tmp_path, 2, start=Stub)
    assert told.began == ["C1", "B3"], "what died runs again, C1 is kept and comes first"


def waiting_part(folder: Path) -> int:
    """Wait until C2 has kept its part; return its process."""
    for _ in range(600):
        found = list(folder.glob("results/C2.parts/first.json"))
        if found:
            return json.loads(found[0].read_text())["result"]["pid"]
        time.sleep(0.05)
    raise AssertionError("C2 has kept no part in half a minute")


def gone(pid: int) -> bool:
    """Wait for a process that is nobody's child here, or a dead one whose parent has not looked."""
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def command(out: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, "-c", COMMAND, "reproduce", "--jobs", "2", "--out", str(out)]
    return subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            env=os.environ | {"PYTHONPATH": path, "FAKES": "C1 C2"},
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))  # fmt: skip


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_what_is_stopped_ends_its_processes_keeps_its_parts_and_says_how_to_go_on(tmp_path, sent):
    process = command(tmp_path)
    child = waiting_part(tmp_path)
    results = tmp_path / "results"
    while not (results / "C1.json").exists():
        time.sleep(0.05)
    time.sleep(0.1)  # between the file and the message of it
    process.send_signal(sent)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + sent
    assert gone(child)
    assert err.splitlines()[-1] == (
        f"Interrupted: 1 of 2 results are kept in {results}; the same command goes on from there."
    )
    assert "Traceback" not in err
    assert sorted(path.name for path in results.rglob("*")) == ["C1.json", "C2.parts", "first.json"]


def test_a_run_that_is_killed_leaves_no_process_behind(tmp_path):
    process = command(tmp_path)
    child = waiting_part(tmp_path)
    process.kill()
    process.communicate(timeout=60)
    assert gone(child)


def test_jobs_below_one_are_refused(capsys, tmp_path):
    assert main(["reproduce", "A1", "--jobs", "0", "--out", str(tmp_path / "out")]) == 2
    assert "--jobs must be at least 1; got 0" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_progress_is_shown_of_all_and_time_is_shared_out():
    shown = StringIO()
    progress = Progress({"A1": 10.0, "A2": 10.0, "A3": 4.0}, shown, jobs=2)
    for name in ("A1", "A2"):
        progress.started(fake_child.load(name))
    assert progress.time_left() == 12
    progress.advanced("A1", 0.5)
    progress.advanced("A2", 0.1)
    assert progress.time_left() == 9, "18 seconds of work for two, the longest takes 9"
    progress.advanced("A1", 0.2)
    assert progress.time_left() == 9, "what was done stays done"
    record = runner.record_of(fake_child.load("A1"), Settings(), "", message="", verdict="passed", seconds=20.0)
    progress.finished(record, fresh=True)
    assert progress.time_left() == 18 and "A1   pass   20 s  (about 18 s left)" in shown.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["B1", "B9", "D2"])
def test_the_documents_numbers_are_the_same_bits_however_many_run(name, tmp_path):
    found = []
    for jobs in (1, 2):
        out = tmp_path / str(jobs)
        assert main(["reproduce", name, "A6", "--quick", "--jobs", str(jobs), "--out", str(out)]) == 0
        (path,) = out.glob(f"results/{name}*.json")
        found.append(without_seconds(json.loads(path.read_text())["result"]))
    assert found[0] == found[1]


def without_seconds(value):
    """Leave out what a clock said."""
    if isinstance(value, dict):
        return {key: without_seconds(x) for key, x in value.items() if key != "seconds"}
    return [without_seconds(x) for x in value] if isinstance(value, list) else value
