"""The command as a user meets it: what it answers, what it refuses, and what it leaves behind."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from innerloop.cli import main

HEAVY = ("torch", "numpy", "matplotlib", "jinja2", "tqdm", "transformers", "jax", "tokenizers")


def run_python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], ["reproduce", "--help"], ["reproduce", "Z9"], ["explain", "--help"], ["rules", "-h"],
     ["bench", "--help"], ["bench", "--seconds", "0"], ["doctor", "-h"]],
)
def test_answers_that_need_no_torch_do_not_import_it(words):
    program = (
        "import sys\n"
        "from innerloop.cli import main\n"
        "try:\n"
        f"    main({words!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        f"print('loaded', sorted(set({HEAVY!r}) & set(sys.modules)))\n"
    )
    done = run_python("-c", program)
    assert done.stdout.splitlines()[-1] == "loaded []", done.stderr


def test_the_version_is_the_packages():
    import innerloop
    from innerloop._version import __version__

    assert innerloop.__version__ == __version__
    done = run_python("-m", "innerloop", "--version")
    assert (done.returncode, done.stdout) == (0, f"innerloop {__version__}\n")


def test_without_a_command_it_explains_itself(capsys):
    assert main([]) == 0
    assert "reproduce" in capsys.readouterr().out


def refused(words, capsys) -> str:
    """Run what must be refused; return the one line that says why."""
    try:
        code = main(words)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    return err


def test_an_unknown_experiment_is_told_the_known_ones(capsys, install, make):
    install(make("A1"), make("B1"))
    assert refused(["reproduce", "a1", "Z9"], capsys) == (
        "innerloop reproduce: NAME must be one of A1 B1; got Z9. innerloop reproduce --list describes them\n"
    )


@pytest.mark.parametrize("words", [["repro"], ["--quick"], ["reproduce", "--qiuck"], ["reproduce", "--out"]])
def test_an_unknown_word_points_to_the_help(words, capsys):
    assert refused(words, capsys).endswith("--help\n")


def test_an_output_that_is_a_file_is_refused(capsys, tmp_path):
    file = tmp_path / "report"
    file.write_text("mine")
    assert refused(["reproduce", "A1", "--out", str(file)], capsys).startswith(
        f"innerloop reproduce: --out must be a folder; got the file {file}"
    )
    assert file.read_text() == "mine"


def test_an_output_below_a_file_is_refused(capsys, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "--out must be a folder" in refused(["reproduce", "A1", "--out", str(tmp_path / "file" / "out")], capsys)


def test_an_output_that_cannot_be_written_is_refused(capsys, tmp_path, monkeypatch):
    def refuse(*, dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    error = refused(["reproduce", "A1", "--out", str(tmp_path)], capsys)
    assert error.endswith(f"--out must be a folder that can be written; got {tmp_path}: Permission denied\n")


def test_data_that_do_not_exist_are_refused(capsys, tmp_path):
    missing = tmp_path / "nowhere"
    assert f"--data must be a file or folder that exists; got {missing}" in refused(
        ["reproduce", "A1", "--data", str(missing), "--out", str(tmp_path / "out")], capsys
    )
    assert not (tmp_path / "out").exists()


def test_a_data_variable_that_points_nowhere_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("INNERLOOP_DATA", str(tmp_path / "nowhere"))
    assert "INNERLOOP_DATA must name a file or folder" in refused(["reproduce", "A1", "--out", str(tmp_path)], capsys)


def test_a_missing_extra_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "jinja2" else object())
    error = refused(["reproduce", "A1", "--out", str(tmp_path)], capsys)
    assert "needs jinja2" in error
    assert "innerloop[report]" in error


def test_without_assertions_nothing_is_run(tmp_path):
    done = run_python("-O", "-m", "innerloop", "reproduce", "A1", "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "assert" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_list_names_every_experiment(capsys, install, make):
    install(make("A1"), make("B12"))
    assert main(["reproduce", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["A1", "B12"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_cannot_be_written_is_one_line():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-m", "innerloop", "reproduce", "--list"], stdout=full,
                              stderr=subprocess.PIPE, text=True, timeout=60, check=False)  # fmt: skip
    assert done.returncode == 1
    assert re.fullmatch(r"innerloop reproduce: .*No space left.*\n", done.stderr)


def test_a_reader_who_leaves_early_sees_no_traceback():
    done = subprocess.run(f"{sys.executable} -m innerloop reproduce --list | head -c 1", shell=True,
                          capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    assert done.stderr == ""


def test_all_are_run_in_order_and_the_page_is_written(capsys, install, make, tmp_path):
    install(make("A1"), make("A2"), make("B1"))
    assert main(["reproduce", "--out", str(tmp_path / "out")]) == 0
    assert make.ran == ["A1", "A2", "B1"]
    assert (tmp_path / "out" / "index.html").is_file()
    assert sorted(path.name for path in (tmp_path / "out" / "results").iterdir()) == ["A1.json", "A2.json", "B1.json"]
    assert "3 of 3 hold" in capsys.readouterr().out


def test_names_are_run_once_in_the_documents_order(install, make, tmp_path):
    install(make("A1"), make("A2"), make("B1"))
    assert main(["reproduce", "b1", "A1", "B1", "--out", str(tmp_path)]) == 0
    assert make.ran == ["A1", "B1"]


def test_failures_are_named_and_the_exit_code_is_one(capsys, install, make, tmp_path):
    def fail(result):
        raise AssertionError("no")

    install(make("A1", check=fail), make("A2"), make("B1", check=fail))
    assert main(["reproduce", "--out", str(tmp_path)]) == 1
    assert f"2 of 3 failed: A1 B1; see {tmp_path / 'index.html'}" in capsys.readouterr().err
    assert make.ran == ["A1", "A2", "B1"]


def test_a_result_that_cannot_be_shown_is_a_failure(capsys, install, make, tmp_path):
    install(make("A1", result={"other": 1.0}), make("A2"))
    assert main(["reproduce", "--out", str(tmp_path)]) == 1
    assert "1 of 2 failed: A1" in capsys.readouterr().err


def test_a_disk_that_fills_up_is_one_line(capsys, install, make, tmp_path, monkeypatch):
    install(make("A1"))

    def refuse(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    assert main(["reproduce", "--out", str(tmp_path)]) == 2
    assert "No space left on device" in capsys.readouterr().err.splitlines()[-1]


def test_where_there_is_no_terminal_progress_is_one_line_an_experiment(capsys, install, make, tmp_path):
    install(make("A1"), make("A2"))
    main(["reproduce", "--out", str(tmp_path)])
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[:2] for line in lines] == [["A1", "pass"], ["A2", "pass"]]
    assert re.search(r"about .* left", lines[0])
    main(["reproduce", "--out", str(tmp_path)])
    assert "kept from an earlier run" in capsys.readouterr().err
