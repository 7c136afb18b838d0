"""Put faults into copies of the package, and see whether the suite notices: ``python -m scripts.mutants``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from scripts.mutants.families import FAMILIES
from scripts.mutants.generic import FILES, changes
from scripts.mutants.trial import Outcome, Trial, run_trials


def main() -> int:
    """Run and return the exit status: 0 only if every fault was caught by a comparison."""
    parser = argparse.ArgumentParser(prog="python -m scripts.mutants", description=__doc__)
    parser.add_argument(
        "families", nargs="*", metavar="FAMILY", help=f"which: {', '.join(FAMILIES)}; with --generic, which files"
    )
    parser.add_argument("--generic", action="store_true", help="change the code at every place instead (hours)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only faults whose name holds this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many at once; as there are cores")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which a fault counts as stuck (240)")
    options = parser.parse_args()
    known = list(FILES if options.generic else FAMILIES)
    for family in options.families:
        if family not in known:
            parser.error(f"FAMILY must be one of {', '.join(known)}; got {family!r}")
    families = options.families or known
    trials, stale = (_everywhere if options.generic else _gather)(families, options.only)
    began = time.monotonic()
    if not stale and not _suite_passes(trials, options.jobs, options.limit):
        return 1
    outcomes = []
    for outcome in run_trials(trials, jobs=options.jobs, limit=options.limit):
        outcomes.append(outcome)
        print(f"[{len(outcomes):3}/{len(trials)}] {_line(outcome)}", flush=True)
    seconds = time.monotonic() - began
    return _list_survivors(outcomes, seconds) if options.generic else _conclude(outcomes, stale, seconds)


def _gather(families: Sequence[str], only: str) -> tuple[list[Trial], list[str]]:
    """Return the trials, and the faults that no longer apply to the code."""
    trials, stale = [], []
    for family in families:
        for mutant in FAMILIES[family]:
            if only not in mutant.name:
                continue
            try:
                trials.append(mutant.trial(family))
            except ValueError as error:
                stale.append(f"{family}: {mutant.name}: {error}")
    return trials, stale


def _everywhere(files: Sequence[str], only: str) -> tuple[list[Trial], list[str]]:
    """Return every change of some files; none of them can be stale."""
    trials = [change.trial(FILES[file]) for file in files for change in changes(file)]
    return [trial for trial in trials if only in trial.name], []


def _suite_passes(trials: Sequence[Trial], jobs: int, limit: float) -> bool:
    """Run every chosen test on the unchanged package: a test that fails anyway proves nothing."""
    parts = []
    for native in (False, True):
        tests = list(dict.fromkeys(test for trial in trials if trial.native == native for test in trial.tests))
        parts += [
            Trial(f"unchanged, part {i + 1}", {}, tuple(tests[i :: 2 * jobs]), native) for i in range(2 * jobs)
        ]
    failed = False
    for outcome in run_trials([part for part in parts if part.tests], jobs=jobs, limit=10 * limit):
        if outcome.verdict != "survived":
            failed = True
            print(f"a test fails without any fault: {outcome.test or outcome.trial.name}: {outcome.why}")
    return not failed


def _line(outcome: Outcome) -> str:
    word = outcome.verdict if outcome.verdict == "caught" else outcome.verdict.upper()
    test = outcome.test.rpartition("::")[2].removeprefix("test_rule_holds_to_the_contract")
    seen = f"\n{'':11}{test}: {outcome.why[:150]}" if test or outcome.why else ""
    return f"{word:8} {outcome.seconds:5.1f} s  {outcome.trial.name}{seen}"


def _conclude(outcomes: Sequence[Outcome], stale: Sequence[str], seconds: float) -> int:
    caught = sum(outcome.verdict == "caught" for outcome in outcomes)
    print(f"\n{caught} of {len(outcomes) + len(stale)} faults caught in {seconds:.0f} s")
    for outcome in outcomes:
        if outcome.verdict == "survived":
            print(f"SURVIVED: {outcome.trial.name}: no test noticed. Write the test that does.")
        elif outcome.verdict != "caught":
            print(
                f"{outcome.verdict.upper()}: {outcome.trial.name}: proves nothing. Choose a fault with finite numbers."
            )
    for message in stale:
        print(f"STALE: {message}")
    return 0 if caught == len(outcomes) and not stale else 1


def _list_survivors(outcomes: Sequence[Outcome], seconds: float) -> int:
    """Print what is to be read and answered in docs/mutants.md; a crash counts as noticed here."""
    survivors = [outcome.trial.name for outcome in outcomes if outcome.verdict == "survived"]
    print(f"\n{len(outcomes) - len(survivors)} of {len(outcomes)} changes noticed in {seconds:.0f} s; the others:")
    print("\n".join(sorted(survivors)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
