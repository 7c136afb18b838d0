"""The faults of ``make mutants`` themselves: that they apply, and that the trial tells caught from survived."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def test_every_fault_still_applies(scripts):
    from scripts.mutants.families import FAMILIES

    names = [trial.name for family, faults in FAMILIES.items() for trial in (fault.trial(family) for fault in faults)]
    assert len(names) == len(set(names)) > 80
    assert min(len(faults) for faults in FAMILIES.values()) >= 10


def test_every_test_that_is_run_against_a_fault_exists(scripts, collected):
    from scripts.mutants.families import FAMILIES
    from scripts.mutants.generic import FILES

    named = {test for tests in FILES.values() for test in tests}
    named |= {test for faults in FAMILIES.values() for fault in faults for test in fault.tests}
    # Most of them this very run has collected, by their own names or as parts of what is named.
    here = set(collected)
    here |= {name.partition("[")[0] for name in here} | {name.partition("::")[0] for name in here}
    here |= {str(Path(name.partition("::")[0]).parent) for name in here}
    missing = sorted(named - here)
    if not missing:
        return
    done = subprocess.run([sys.executable, "-m", "pytest", "--collect-only", "-q", *missing],
                          cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-500:]


def test_a_fault_that_no_longer_applies_says_so(scripts):
    from scripts.mutants.mutant import Mutant

    for old in ("no such text", "Tensor"):
        with pytest.raises(ValueError, match=r"no longer applies: shapes.py must hold the old text exactly once"):
            Mutant("gone", "shapes.py", old, "other", ()).trial("family")


def test_every_change_of_a_file_compiles_and_differs(scripts):
    from scripts.mutants.generic import PACKAGE, changes

    source = (PACKAGE / "algebra/decay.py").read_text()
    found = list(changes("algebra/decay.py"))
    assert len(found) > 20
    assert all(change.text != source for change in found)
    assert any(
        (change.before, change.after) == ("factor[..., None] * row + start", "(factor[..., None] * row - start)")
        for change in found
    )


PROGRAM = """
from scripts.mutants.trial import ROOT, Trial, run_trials
source = (ROOT / "src/innerloop/shapes.py").read_text()
swapped = source.replace("float64 if dtype", "float32 if dtype")
test = ("tests/ops/test_errors.py::test_an_unknown_rule_lists_the_known",)
values = ("tests/rules/test_theorems.py::test_softmax_attention_is_the_mean_under_the_softmax",)
trials = [
    Trial("same", {}, test),
    Trial("harmless", {"shapes.py": source + "\\n"}, test),
    Trial("wrong", {"shapes.py": swapped}, values),
    Trial("broken", {"shapes.py": source + "\\nraise RuntimeError('no')\\n"}, test),
    Trial("endless", {"shapes.py": source + "\\nwhile True: pass\\n"}, test),
]
for outcome in run_trials(trials, jobs=2, limit=15.0):
    print(outcome.trial.name, outcome.verdict)
assert (ROOT / "src/innerloop/shapes.py").read_text() == source
"""


@pytest.mark.slow
def test_a_trial_tells_caught_from_survived_crashed_and_stuck():
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    outcomes = dict(line.split() for line in done.stdout.splitlines())
    want = {"same": "survived", "harmless": "survived", "wrong": "caught", "broken": "crashed", "endless": "stuck"}
    assert outcomes == want
