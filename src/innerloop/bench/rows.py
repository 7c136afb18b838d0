"""The table: what is measured on a machine, what it must reach and what it aims at."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from innerloop.bench.call import cost_of_a_call
from innerloop.bench.compare import Pace, compare, distance, peak_here
from innerloop.bench.contenders import Absent, Contender, title
from innerloop.bench.machine import load
from innerloop.bench.measure import interleaved
from innerloop.bench.workload import Workload

Finding = dict[str, Any]
"""Plain values: what was measured, what was wanted, and the verdict."""
_GATED = Workload("gated_delta_rule", "forward")
_MANY = Workload("gated_delta_rule", "forward", B=8, T=512, H=4, K=64)


@dataclass(frozen=True)
class Row(ABC):
    """One line: a number that must be reached, and one, often of another kind, that is aimed at."""

    workload: Workload
    least: float
    aim: float
    low: ClassVar[bool] = False
    """Whether less is better."""
    unit: ClassVar[str] = "×"
    aim_low: ClassVar[bool] = False
    aim_unit: ClassVar[str] = "×"

    @property
    def title(self) -> str:
        """What is measured."""
        return f"{self.workload.rule} {self.workload}"

    @abstractmethod
    def find(self, pace: Pace) -> Finding:
        """Return ``value``, ``aim_value`` (None where there is nothing to compare with) and whatever explains them."""

    def measure(self, pace: Pace) -> Finding:
        """Measure and judge."""
        found = {"title": self.title, "note": "", **self.find(pace), "load": load()}
        found["wanted"] = _bar(self.least, self.unit, self.low)
        found["hoped"] = _bar(self.aim, self.aim_unit, self.aim_low)
        value, aimed = found["value"], found["aim_value"]
        found["measured"] = "" if value is None else amount(value, self.unit)
        found["aim_measured"] = "" if aimed is None else amount(aimed, self.aim_unit)
        found["verdict"] = "absent" if value is None else "pass" if _reached(value, self.least, self.low) else "short"
        found["aimed"] = aimed is not None and _reached(aimed, self.aim, self.aim_low)
        return found


def _reached(value: float, bar: float, low: bool) -> bool:
    return value <= bar if low else value >= bar


def _bar(value: float, unit: str, low: bool) -> str:
    return f"{'≤' if low else '≥'} {amount(value, unit)}"


def amount(value: float, unit: str) -> str:
    """Return a number with its unit, in as many digits as it deserves."""
    if unit == "%":
        return f"{100 * value:.0f}%"
    if unit == "T":
        return f"T {value:.0f}"
    return f"{value:.3g}{unit}" if unit == "×" else f"{value:.3g} {unit}"


@dataclass(frozen=True)
class Versus(Row):
    """Someone else's time over ours; the aim is a share of the machine's large products, or a higher ratio."""

    against: str = "transformers"
    aim_unit: ClassVar[str] = "%"

    def find(self, pace: Pace) -> Finding:
        """Compare."""
        found = compare(self.workload, [self.against], pace)
        ratio = _ratio(found, self.against)
        return {"value": ratio, "aim_value": self._aimed(found, ratio), "comparison": found, "note": _why(found)}

    def _aimed(self, found: Finding, ratio: float | None) -> float | None:
        return found["share"].get("large") if found["share"] else None


@dataclass(frozen=True)
class Faster(Versus):
    """The same, where the aim too is a ratio."""

    aim_unit: ClassVar[str] = "×"

    def _aimed(self, found: Finding, ratio: float | None) -> float | None:
        return ratio


@dataclass(frozen=True)
class Token(Row):
    """A single token; the aim is in units of the time in which the state is read and written once."""

    against: str = "transformers"
    aim_low: ClassVar[bool] = True

    def find(self, pace: Pace) -> Finding:
        """Compare."""
        found = compare(self.workload, [self.against], pace)
        return {
            "value": _ratio(found, self.against), "aim_value": found["of_floor"], "comparison": found,
            "note": _why(found),
        }  # fmt: skip


@dataclass(frozen=True)
class Halves(Row):
    """Our time for float32 inputs over that for bfloat16."""

    @property
    def title(self) -> str:
        """What is measured."""
        return f"{super().title} against float32"

    def find(self, pace: Pace) -> Finding:
        """Time both on the same numbers, as far as bfloat16 holds them."""
        call = self.workload.draw()
        wide = self.workload.at(dtype="float32")
        half, full = Contender("innerloop", self.workload, call), Contender("innerloop", wide, call.to(torch.float32))
        times = interleaved({"half": half, "full": full}, seconds=pace.seconds)
        ratio = times["full"]["median"] / times["half"]["median"]
        error = distance(half.output(), full.output())
        return {"value": ratio, "aim_value": ratio, "times": times, "error": error, "note": f"error {error:.1e}"}


@dataclass(frozen=True)
class Flat(Row):
    """Time a token of a long sequence over that of a short one."""

    low: ClassVar[bool] = True
    aim_low: ClassVar[bool] = True
    long: int = 65_536

    @property
    def title(self) -> str:
        """What is measured."""
        return f"{super().title}: time a token at T{self.long} over that here"

    def find(self, pace: Pace) -> Finding:
        """Time both lengths in turn."""
        works = {str(T): Contender("innerloop", self.workload.at(T=T)) for T in (self.workload.T, self.long)}
        times = interleaved(works, seconds=3 * pace.seconds)
        short, long = (times[str(T)]["median"] / T for T in (self.workload.T, self.long))
        return {"value": long / short, "aim_value": long / short, "times": times}


@dataclass(frozen=True)
class Crossover(Row):
    """The length from which on we are faster than softmax attention."""

    low: ClassVar[bool] = True
    unit: ClassVar[str] = "T"
    aim_low: ClassVar[bool] = True
    aim_unit: ClassVar[str] = "T"
    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)

    @property
    def title(self) -> str:
        """What is measured."""
        return f"{super().title.replace(f'T{self.workload.T} ', '')}: faster than softmax attention from"

    def find(self, pace: Pace) -> Finding:
        """Compare at every length."""
        quick = Pace(pace.seconds / 3, memory=False)
        ratios = {}
        for length in self.lengths:
            found = compare(self.workload.at(T=length), ["sdpa"], quick, rates=False)
            ratios[length] = found["contenders"]["sdpa"]["ratio"]
        slower = [length for length, ratio in ratios.items() if ratio < 1]
        beyond = [length for length in self.lengths if length > max(slower, default=0)]
        # Where we never are, it lies beyond the last.
        value = float(beyond[0]) if beyond else 2.0 * self.lengths[-1]
        words = ", ".join(f"{ratio:.2f}× at {length}" for length, ratio in ratios.items())
        return {"value": value, "aim_value": value, "ratios": ratios, "note": words}


@dataclass(frozen=True)
class Memory(Row):
    """Our peak memory over someone else's."""

    low: ClassVar[bool] = True
    aim_low: ClassVar[bool] = True
    against: str = "transformers"

    @property
    def title(self) -> str:
        """What is measured."""
        return f"{super().title}: peak memory"

    def find(self, pace: Pace) -> Finding:
        """Measure both, each in a process of its own."""
        try:
            Contender(self.against, self.workload.at(T=64))
        except Absent as error:
            return {"value": None, "aim_value": None, "note": str(error)}
        ours, other = (peak_here(name, self.workload) for name in ("innerloop", self.against))
        if not ours or not other:
            return {"value": None, "aim_value": None, "note": "this system does not say what a process takes"}
        note = f"{ours / 2**20:,.0f} MiB against {other / 2**20:,.0f} of {title(self.against, self.workload)}"
        return {"value": ours / other, "aim_value": ours / other, "memory": [ours, other], "note": note}


@dataclass(frozen=True)
class Cost(Row):
    """What a call costs that computes next to nothing, through a kernel where there is one."""

    low: ClassVar[bool] = True
    unit: ClassVar[str] = "µs"
    aim_low: ClassVar[bool] = True
    aim_unit: ClassVar[str] = "µs"
    part: str = "step"

    @property
    def title(self) -> str:
        """What is measured."""
        words = {"step": "a step", "call": "a call with a gradient"}
        return f"Python and binding of {words[self.part]}"

    def find(self, pace: Pace) -> Finding:
        """Time it beside its parts."""
        cost = cost_of_a_call()
        note = ", ".join(f"{what} {found:.1f}" for what, found in cost.items())
        value = cost.get(f"native {self.part}", cost[self.part])
        return {"value": value, "aim_value": value, "cost": cost, "note": note}


def _ratio(found: Finding, against: str) -> float | None:
    other = found["contenders"].get(against)
    return None if other is None else other["ratio"]


def _why(found: Finding) -> str:
    words = list(found["absent"].values())
    return "; ".join(words if found["kernel"] else [*words, f"{found['workload']['rule']} has no native kernel here"])


def _both(workload: Workload) -> Workload:
    return workload.at(way="both")


def _rule(name: str) -> Workload:
    return _GATED.at(rule=name)


ROWS: tuple[Row, ...] = (
    Versus(_GATED, 5.0, 0.75),
    Versus(_MANY, 6.5, 0.70),
    Versus(_both(_GATED), 9.0, 0.70),
    Versus(_both(_MANY), 6.0, 0.60),
    Versus(_both(_GATED).at(T=8192), 35.0, 0.60),
    Token(_GATED.at(way="decode"), 8.0, 1.5),
    Token(_GATED.at(way="decode", B=16), 8.0, 1.5),
    Versus(_rule("kda"), 4.0, 0.60),
    Versus(_both(_rule("kda")), 6.0, 0.60),
    Versus(_rule("rwkv7"), 4.0, 0.60, against="torch"),
    Versus(_both(_rule("rwkv7")), 6.0, 0.60, against="torch"),
    Versus(_rule("gdn2"), 4.0, 0.60, against="torch"),
    Versus(_both(_rule("gdn2")), 6.0, 0.60, against="torch"),
    Faster(_both(_rule("momentum_delta_rule")), 4.0, 6.0, against="torch"),
    Halves(_GATED.at(dtype="bfloat16"), 1.3, 2.0),
    Flat(_GATED, 1.15, 1.05),
    Flat(_both(_GATED), 1.15, 1.05),
    Crossover(_GATED, 512, 256),
    Crossover(_both(_GATED), 512, 256),
    Faster(_both(_GATED).at(B=1024, T=32, H=2, K=64), 12.0, 25.0, against="loop"),
    Memory(_both(_GATED).at(T=8192), 0.25, 0.125),
    Cost(_GATED, 15.0, 8.0, part="step"),
    Cost(_GATED, 40.0, 25.0, part="call"),
)
"""Two cores and float32 were meant where nothing else is said."""
