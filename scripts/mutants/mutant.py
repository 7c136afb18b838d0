"""A fault put in by hand: a name, a small change of one file, and where it should be noticed."""

from __future__ import annotations

from dataclasses import dataclass

from scripts.mutants.trial import ROOT, Trial


@dataclass(frozen=True)
class Mutant:
    """A fault."""

    name: str
    file: str
    """Path below ``src/innerloop``."""
    old: str
    """Text that occurs exactly once in the file."""
    new: str
    tests: tuple[str, ...]
    """The tests most likely to notice, most likely first."""

    def trial(self, family: str) -> Trial:
        """Return the change and its tests.

        Raises:
            ValueError: If the file no longer holds the old text exactly once.
        """
        text = (ROOT / "src" / "innerloop" / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(
                f"no longer applies: {self.file} must hold the old text exactly once; it holds it "
                f"{text.count(self.old)} times. Write the fault anew: {self.old.strip().splitlines()[0]!r}"
            )
        edits = {self.file: text.replace(self.old, self.new)}
        # Tests of what calls the kernels are skipped where none are built, and would let every fault pass.
        native = not self.file.endswith(".py") or self.file.startswith("kernels/native/") or family == "native"
        return Trial(f"{family}: {self.name}", edits, self.tests, native=native)


def contract(rules: str, properties: str) -> tuple[str, ...]:
    """Return the node ids of some properties of the contract for some rules, both separated by blanks."""
    test = "tests/rules/test_contract.py::test_rule_holds_to_the_contract"
    return tuple(f"{test}[{rule}-{name}]" for name in properties.split() for rule in rules.split())


def tests(file: str, names: str) -> tuple[str, ...]:
    """Return the node ids of some tests of a file, separated by blanks."""
    return tuple(f"tests/{file}::{name}" for name in names.split())
