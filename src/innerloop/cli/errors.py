"""Wrong input on the command line: one line on stderr, exit code 2."""

from __future__ import annotations

import argparse
from typing import NoReturn


class InputError(Exception):
    """What was wrong, what was wanted, what was got and how to mend it, in one line."""


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are one line, without the usage in front."""

    def error(self, message: str) -> NoReturn:
        """Leave with exit code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")
