"""Show the table of rules.

Each with its three choices, its gates and their ranges, the size of its state, its forms, and where it was published.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from innerloop.cli.errors import InputError
from innerloop.cli.sizes import HEADS, add_sizes, checked_sizes

if TYPE_CHECKING:
    from innerloop.network import NetworkRule
    from innerloop.rule import Rule

NAME = "rules"

Row = dict[str, Any]


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="rules such as delta_rule; all if none is named")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, one object a rule")
    form.add_argument("--markdown", action="store_true", help="print the page that docs/rules.md holds")
    add_sizes(parser, "B T H G K V", B=1, T=4096, H=16, K=128, V=128)


def run(arguments: argparse.Namespace) -> int:
    """Print the table.

    Args:
        arguments: What :func:`add` declared.

    Returns:
        0.

    Raises:
        InputError: If an argument is wrong.
    """
    sizes = checked_sizes(arguments, "B T H G K V")
    from innerloop import rules
    from innerloop.network import NetworkRule

    known = {module.RULE.name: module.RULE for module in (*rules.ALL, *rules.NETWORKS)}
    if unknown := [name for name in arguments.names if name not in known]:
        raise InputError(f"NAME must be one of {', '.join(known)}; got {', '.join(unknown)}")
    rows = [
        network_row(rule, sizes) if isinstance(rule, NetworkRule) else row(rule, sizes)
        for name, rule in known.items()
        if name in arguments.names or not arguments.names
    ]
    if arguments.json:
        print(json.dumps({"shape": sizes, "rules": rows}, indent=1, ensure_ascii=False))
    elif arguments.markdown:
        print(page(rows, sizes))
    else:
        print("\n\n".join(block(row) for row in rows))
        print(f"\nState sizes are for {_words(sizes)}; float32.")
    return 0


def row(rule: Rule, sizes: dict[str, int]) -> Row:
    """Return all that the table says of a rule, as plain values.

    Args:
        rule: The rule.
        sizes: The size of each axis, for the bytes of the state.

    Returns:
        A dict that JSON can hold; ``weights``, ``class`` and ``solver`` are None where ``departs`` says why.
    """
    choices = rule.recipe.describe() if rule.recipe is not None else (None, None, None)
    return {
        "name": rule.name,
        **dict(zip(("weights", "class", "solver"), choices, strict=True)),
        "departs": rule.departs or None,
        "gates": _gates(rule),
        "constants": [{"name": x.name, "default": x.default, "above": _number(x.above)} for x in rule.constants],
        "state": {name: ["N", *axes] for name, axes in rule.states.items()},
        "grows": rule.grows,
        "state_bytes": state_bytes(rule, sizes),
        "forms": ["recurrent", *(["chunk"] if rule.has_chunk else [])],
        "backends": backends(rule),
        "paper": rule.paper,
    }  # fmt: skip


def network_row(rule: NetworkRule, sizes: dict[str, int]) -> Row:
    """Return the same of a rule whose memory is a network, of the size that its layer has if nothing is said.

    Args:
        rule: The rule.
        sizes: The size of each axis.

    Returns:
        As :func:`row`; ``class`` says whose bytes they are.
    """
    from innerloop.cli import networks

    *fields, place = rule.state_type._fields  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "name": rule.name, "weights": None, "class": networks.MEMORIES[rule.name], "solver": None,
        "departs": rule.departs, "gates": _gates(rule), "constants": [],
        # What a gradient from outside would need stands in a state only while one is awaited.
        "state": {**{name: ["N", "*weights"] for name in fields if name != "pending"}, place: ["N"]},
        "grows": False, "state_bytes": networks.state_bytes(rule, sizes), "forms": ["recurrent", "chunk"],
        "backends": ["torch"], "paper": rule.paper,
    }  # fmt: skip


def _gates(rule: Rule | NetworkRule) -> list[dict[str, Any]]:
    return [
        {"name": x.name, "axes": list(x.axes), "low": _number(x.low), "high": _number(x.high),
         "bounds": x.bounds.removeprefix("lie ").removeprefix("be "), "optional": x.optional}
        for x in rule.gates
    ]  # fmt: skip


def state_bytes(rule: Rule, sizes: dict[str, int]) -> int:
    """Return the bytes of a rule's state after T tokens of float32 or half inputs."""
    sizes = {**sizes, "N": sizes["B"], "S": sizes["T"]}
    total = 0
    for axes in rule.states.values():
        count = sizes["N"]
        for axis in axes:
            count *= sizes[axis]
        total += count * (4 if axes else 8)
    return total


def backends(rule: Rule) -> list[str]:
    """Return the backends that serve a rule in this installation, by asking for each."""
    from innerloop.checks import BACKENDS, check_options

    found = []
    for backend in BACKENDS:
        try:
            check_options(rule, tuple(x.default for x in rule.constants), backend=backend)
        except RuntimeError:
            continue
        found.append(backend)
    return found


def block(row: Row) -> str:
    """Return a few lines of plain text."""
    head = row["departs"] and f"departs: {row['departs']}"
    lines = {
        "choices": head or " · ".join(row[x] for x in ("weights", "class", "solver")),
        "memory": row["departs"] and row["class"],
        "gates": ", ".join(_gate_words(row)) or "none",
        "state": f"{_state_words(row)}; {row['state_bytes']:,} bytes{', growing' if row['grows'] else ''}",
        "forms": f"{', '.join(row['forms'])}; backend {', '.join(row['backends'])}",
        "paper": row["paper"] or "none",
    }
    return "\n".join((row["name"], *(f"  {name:<9}{text}" for name, text in lines.items() if text)))


def page(rows: Sequence[Row], sizes: dict[str, int]) -> str:
    """Return the Markdown page of all rules."""
    columns = ("rule", "weights", "class", "solver", "gates", "state", "bytes", "forms", "paper")
    lines = [
        "# Rules",
        "",
        "Written by `make docs` from the list of rules. `innerloop rules` prints the same for any shape, and the",
        "backends that this installation has. The bytes are those of a float32 state for",
        f"{_words(sizes)}.",
        "Axes are those of `innerloop.shapes`; ranges say where a value has a meaning. Memories of the last are",
        "the caller's own networks: the bytes are those of the one named.",
        "",
        f"| {' | '.join(columns)} |",
        f"| {' | '.join('---' for _ in columns)} |",
    ]
    for row in rows:
        choices = [row[x] for x in ("weights", "class", "solver")] if row["departs"] is None else [
            "–", row["class"] or "–", f"departs: {row['departs']}"]  # fmt: skip
        cells = [
            f"`{row['name']}`", *choices, "<br>".join(_gate_words(row)) or "–", _state_words(row),
            f"{row['state_bytes']:,}{', grows with T' if row['grows'] else ''}", ", ".join(row["forms"]),
            row["paper"] or "–",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _gate_words(row: Row) -> list[str]:
    gates = [
        f"{x['name']} [{', '.join(x['axes'])}] {x['bounds']}{', optional' if x['optional'] else ''}"
        for x in row["gates"]
    ]
    return gates + [f"{x['name']} above {x['above']}, {x['default']:g} if left out" for x in row["constants"]]


def _state_words(row: Row) -> str:
    return ", ".join(f"{name} [{', '.join(axes)}]" for name, axes in row["state"].items())


def _number(value: float) -> float | int | str:
    """Return a number as JSON and people can read it."""
    if value in (float("inf"), -float("inf")):
        return "inf" if value > 0 else "-inf"
    return int(value) if value == int(value) and abs(value) < 2**53 else value


def _words(sizes: dict[str, int]) -> str:
    return ", ".join(f"{axis} = {size}" for axis, size in sizes.items()) + f" ({HEADS})"
