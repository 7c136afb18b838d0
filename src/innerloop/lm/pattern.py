"""Which layers a model has, in one line: ``3*gated_delta_rule+attention(window=64)``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import NoReturn

from innerloop.lm.kinds import KINDS, SHORT

Value = int | float | bool | str | None
"""What an option may be in a pattern."""

_TOKENS = re.compile(
    r"\s*(?:(?P<number>-?\d[\d_.]*(?:[eE][-+]?\d+)?)|(?P<name>[A-Za-z_]\w*)|(?P<sign>.))", re.DOTALL
)
_WORDS: dict[str, Value] = {"true": True, "false": False, "none": None}
_MOST = 100_000
"""Layers that a pattern may name: more is a slip of the keyboard."""
_DEEPEST = 50
"""Brackets that may stand inside each other."""


@dataclass(frozen=True)
class Entry:
    """One layer of a model: its rule, and the options that differ from the layer's own defaults."""

    rule: str
    options: tuple[tuple[str, Value], ...] = ()


@lru_cache(maxsize=256)
def parse(pattern: str) -> tuple[Entry, ...]:
    """Read a pattern: names of rules joined by ``+``, repeated by ``n*``, grouped by parentheses.

    Options stand behind a name in parentheses: whole numbers, numbers, ``true``, ``false``, ``none`` or words.
    ``attention`` is short for ``softmax_attention``.

    Args:
        pattern: Such as ``2*(3*gated_delta_rule+attention(window=64))``.

    Returns:
        The layers from the first to the last.

    Raises:
        TypeError: If it is no string.
        ValueError: If it does not parse or names an unknown layer; the message says where.

    Example:
        >>> from innerloop.lm import parse
        >>> [entry.rule for entry in parse("2*mamba2+attention")]
        ['mamba2', 'mamba2', 'softmax_attention']
        >>> parse("kda+atention")
        Traceback (most recent call last):
            ...
        ValueError: pattern 'kda+atention', character 5: wanted the name of a layer; got 'atention'. Did you mean
        'attention'?
    """
    if not isinstance(pattern, str):
        raise TypeError(f"pattern must be a string such as '3*kda+attention'; got {type(pattern).__name__}")
    return _Reader(pattern).all()


class _Reader:
    """A cursor over the tokens of a pattern: a number, a name, or one sign each."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.tokens = [(m.lastgroup, m[m.lastgroup or 0], m.start(m.lastgroup or 0)) for m in _TOKENS.finditer(pattern)]
        self.tokens = [token for token in self.tokens if not token[1].isspace()]
        self.tokens.append(("end", "", len(pattern)))
        self.place, self.depth = 0, 0

    def all(self) -> tuple[Entry, ...]:
        found = self.sum()
        if self.kind != "end":
            self.fail("'+' or the end")
        return tuple(found)

    def sum(self) -> list[Entry]:
        found = self.term()
        while self.take("+"):
            found += self.term()
            if len(found) > _MOST:
                self.fail(f"at most {_MOST:,} layers", got=f"{len(found):,}")
        return found

    def term(self) -> list[Entry]:
        if self.kind != "number":
            return self.atom()
        text = self.word
        few = text.isascii() and text.isdigit() and len(text) <= len(str(_MOST))
        if not few or not 1 <= int(text) <= _MOST:
            self.fail(f"a whole number from 1 to {_MOST:,} before '*'")
        self.place += 1
        if not self.take("*"):
            self.fail(f"'*' behind {text}", cure=f"'{text}*name' repeats a layer.")
        found = self.term()
        if len(found) * int(text) > _MOST:
            self.fail(f"at most {_MOST:,} layers", got=f"{len(found) * int(text):,}")
        return found * int(text)

    def atom(self) -> list[Entry]:
        if self.take("("):
            self.depth += 1
            if self.depth > _DEEPEST:
                self.fail(f"at most {_DEEPEST} brackets inside each other")
            found = self.sum()
            if not self.take(")"):
                self.fail("'+' or ')'")
            self.depth -= 1
            return found
        if self.kind != "name":
            self.fail("a layer, a number or '('", cure=f"Layers are {', '.join((*SHORT, *KINDS))}.")
        rule = SHORT.get(self.word, self.word)
        if rule not in KINDS:
            near = get_close_matches(self.word, (*SHORT, *KINDS), 1)
            known = f"Did you mean {near[0]!r}?" if near else f"Layers are {', '.join((*SHORT, *KINDS))}."
            self.fail("the name of a layer", cure=known)
        self.place += 1
        return [Entry(rule, tuple(self.options()) if self.take("(") else ())]

    def options(self) -> list[tuple[str, Value]]:
        found: list[tuple[str, Value]] = []
        while not self.take(")"):
            if found and not self.take(","):
                self.fail("',' or ')'")
            name = self.word
            if self.kind != "name":
                self.fail("the name of an option", cure="Options are written name=value.")
            if name in dict(found):
                self.fail("every option once")
            self.place += 1
            if not self.take("="):
                self.fail(f"'=' behind {name}", cure="Options are written name=value.")
            found.append((name, self.value()))
        return found

    def value(self) -> Value:
        kind, word = self.kind, self.word
        if kind == "name":
            self.place += 1
            return _WORDS.get(word.lower(), word)
        if kind == "number":
            for read in (int, float):
                try:
                    value = read(word)
                except ValueError:
                    continue
                self.place += 1
                return value
        return self.fail("a number, a word, true, false or none")

    @property
    def kind(self) -> str | None:
        return self.tokens[self.place][0]

    @property
    def word(self) -> str:
        return self.tokens[self.place][1]

    def take(self, sign: str) -> bool:
        """Step over a sign, if it comes next."""
        found = self.kind == "sign" and self.word == sign
        self.place += found
        return found

    def fail(self, wanted: str, *, got: str = "", cure: str = "") -> NoReturn:
        got = got or (f"{self.word!r:.40}" if self.kind != "end" else "the end")
        pattern = self.pattern if len(self.pattern) <= 120 else f"{self.pattern[:117]}..."
        where = self.tokens[self.place][2] + 1
        raise ValueError(f"pattern {pattern!r}, character {where}: wanted {wanted}; got {got}. {cure}".rstrip())
