"""The measurements as text for a terminal and as a page with figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from innerloop.bench.curves import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BY_HAND = "<!-- From here on the page is written by hand, and `make bench` leaves it as it is. -->"
FIGURES = ("length", "decode")
"""Names of the page's pictures, ``bench-NAME.svg``."""
_NAMES = {
    "innerloop": ("innerloop", "C0"), "torch": ("portable form", "C2"), "transformers": ("transformers", "C1"),
    "sdpa": ("softmax attention", "C3"), "floor": ("state, read and written once", "C4"),
}  # fmt: skip


def seconds_text(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1 or unit == "µs":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError


def bytes_text(count: int | None) -> str:
    """Return a size in MiB, a dash for None."""
    return "–" if count is None else f"{count / 2**20:,.1f} MiB"


def comparison_text(found: dict[str, Any]) -> str:
    """Return one comparison in a few lines."""
    lines = [f"{found['title']}   (load {found['load']})"]
    for name, x in found["contenders"].items():
        times = x["times"]
        spread = f"{seconds_text(times['low'])} to {seconds_text(times['high'])}, {times['samples']} samples"
        ratio = "" if name == "innerloop" else f"{x['ratio']:8.2f}×"
        memory = "" if x["memory"] is None else f"  peak {bytes_text(x['memory'])}"
        lines.append(f"  {x['title']:<52}{seconds_text(times['median']):>10}{ratio:>10}   ({spread}){memory}")
    lines += [f"  {why}" for why in found["absent"].values()]
    if not found["kernel"]:
        lines.append(f"  {found['workload']['rule']} has no native kernel here: ours is the portable form")
    if found.get("share"):
        rates, share = found["rates"], found["share"]
        lines.append(
            f"  {100 * share['large']:.0f}% of the rate of one large product ({rates['large'] / 1e9:.0f} GF/s), "
            f"{100 * share['small']:.0f}% of many small ones ({rates['small'] / 1e9:.0f} GF/s)"
        )
    if "floor" in found:
        lines.append(
            f"  {found['of_floor']:.2f}× the time to read and write the state once, {seconds_text(found['floor'])} "
            f"at {found['rates']['in_place'] / 1e9:.0f} GB/s"
        )
    return "\n".join(lines)


def row_text(row: dict[str, Any]) -> str:
    """Return a row of the table as one line, with its note below."""
    aimed = f"{row['aim_measured']} of {row['hoped']}" if row["aim_measured"] else ""
    line = f"{row['verdict']:<7}{row['title']:<76}{row['measured']:>9} of {row['wanted']:<9}  aim {aimed:<18}"
    compared = row.get("comparison")
    if compared:
        line += "  " + ", ".join(
            f"{x['title'] if name != 'innerloop' else 'ours'} {seconds_text(x['times']['median'])}"
            for name, x in compared["contenders"].items()
        )
    return line.rstrip() + (f"\n{'':7}{row['note']}" if row["note"] else "")


def kept(text: str) -> str:
    """Return what was written by hand into an earlier page."""
    return text.partition(BY_HAND)[2].strip()


def page(result: dict[str, Any], by_hand: str = "") -> str:
    """Return the page in Markdown; its pictures are those of :func:`pictures`, in ``images`` beside it."""
    parts = [
        "# Benchmarks\n",
        _about(result),
        _HOW,
        "## What was to be reached\n",
        *_measured_since(result),
        table(_COLUMNS, (_row(row) for row in result["rows"])),
        *_notes(result["rows"]),
        "\n## Against length and batch\n",
        "![Time of a sequence against its length](images/bench-length.svg)\n",
        "![Time of a token against the batch](images/bench-decode.svg)\n",
        _curve_table(result["curves"]),
        "\n## Every rule\n",
        "B1 T1024 H4 K64, float32: milliseconds, of a token microseconds; behind the stroke the portable form.\n",
        table(("rule", "kernel", "forward", "forward+backward", "token"), (_rule(x) for x in result["rules"])),
        "\n## A busy neighbour\n",
        "The same call and torch's own product, alone and beside a process that keeps one core busy.\n",
        table(("neighbour", "`OMP_WAIT_POLICY`", "ours", "torch.mm"), (_neighbour(x) for x in result["neighbours"])),
        f"\n{BY_HAND}\n",
        by_hand,
    ]
    return "\n".join(parts).rstrip() + "\n"


_COLUMNS = ("", "measured", "at least", "aim", "verdict", "ours", "other", "share", "peak memory", "load")
_HOW = """\
Each comparison runs interleaved in one process; times are medians. A share is the arithmetic that the chunk form needs
at least (per token and head, C = 32: forward 6KV + (2C + 16) 2K, backward 12KV + 10KC; with momentum the first terms
twice) per second, against one large product of matrices and, behind the stroke, against many small ones, timed in
between. The floor of a token is the time to read and write its state once, where it lies. Peak memory is what a call
adds to its inputs, in a process of its own, ours first. The load is the mean number of processes that wanted a core in
the minute before.
"""


def _about(result: dict[str, Any]) -> str:
    machine = result["machine"]
    kernels = machine["instruction_set"] or f"none ({machine['no_kernels']})"
    return (
        f"Written by `make bench` at commit {result['commit'] or 'unknown'}, on {machine['cpu']}, {machine['cores']} "
        f"cores, {machine['threads']} threads, {machine['memory_gb']} GiB, {machine['system']}; Python "
        f"{machine['python']}, torch {machine['torch']}, transformers {machine['transformers'] or 'absent'}, kernels: "
        f"{kernels}. Load at the start: {machine['load']}.\n"
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(x)} |" for x in (columns, ["---"] * len(columns), *rows))


def _row(row: dict[str, Any]) -> list[str]:
    compared = row.get("comparison") or {"contenders": {}}
    contenders = compared["contenders"]
    ours = contenders.get("innerloop")
    others = [x for name, x in contenders.items() if name != "innerloop"]
    share = compared.get("share") or {}
    aim = f"{row['hoped']}{', reached' if row['aimed'] else ''}"
    return [
        row["title"], row["measured"] or "–", row["wanted"], aim, f"**{row['verdict']}**",
        seconds_text(ours["times"]["median"]) if ours else "–",
        " ".join(seconds_text(x["times"]["median"]) for x in others) or "–",
        f"{100 * share['large']:.0f}% / {100 * share['small']:.0f}%" if share
        else f"{compared['of_floor']:.2f}× floor" if "of_floor" in compared else "–",
        " / ".join(bytes_text(x["memory"]) for x in (ours, *others) if x) or "–",
        str(row["load"]),
    ]  # fmt: skip


def _notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    others: dict[str, None] = {}
    for row in rows:
        found = row.get("comparison", {}).get("contenders", {})
        others |= {x["title"]: None for name, x in found.items() if name != "innerloop"}
    notes = [f"- {row['title']}: {row['note']}" for row in rows if row["note"]]
    return ["", f"Others: {'; '.join(others)}.", "", *notes]


def _measured_since(result: dict[str, Any]) -> list[str]:
    """Return a sentence for each later commit at which rows were measured again."""
    titles: dict[str, list[str]] = {}
    for row in result["rows"]:
        if row.get("commit", result["commit"]) != result["commit"]:
            titles.setdefault(row["commit"] or "unknown", []).append(row["title"])
    return [f"Measured again, at commit {commit}: {'; '.join(rows)}.\n" for commit, rows in titles.items()]


def _rule(row: dict[str, Any]) -> list[str]:
    cells = []
    for way, factor in (("forward", 1e3), ("both", 1e3), ("decode", 1e6)):
        times = row[way]
        portable = f" / {factor * times['torch']:.1f}" if row["kernel"] and "torch" in times else ""
        cells.append(f"{factor * times['innerloop']:.1f}{portable}")
    return [f"`{row['rule']}`", "yes" if row["kernel"] else "no", *cells]


def _neighbour(row: dict[str, Any]) -> list[str]:
    return ["busy" if row["busy"] else "none", row["policy"], seconds_text(row["ours"]), seconds_text(row["mm"])]


def _curve_table(curves: dict[str, dict[str, Curve]]) -> str:
    parts = []
    for way, title in (("forward", "forward, T"), ("both", "forward+backward, T"), ("decode", "a token, B")):
        sizes = [size for size, _ in curves[way]["innerloop"]]
        rows = []
        for name, curve in curves[way].items():
            times = {size: seconds for size, seconds in curve}
            rows.append([_NAMES[name][0], *(seconds_text(times[x]) if x in times else "–" for x in sizes)])
        parts.append(table((title, *map(str, sizes)), rows))
    return "\n\n".join(parts)


def pictures(result: dict[str, Any]) -> dict[str, str]:
    """Return the page's figures as SVG, by file name.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    from innerloop.experiments.experiment import Figure
    from innerloop.report.drawing import draw

    curves = result["curves"]

    def lengths(axes: Axes) -> None:
        for way, style in (("forward", "-"), ("both", "--")):
            _lines(axes, curves[way], style, "" if way == "forward" else None)
        axes.set(title="a sequence: forward (–) and with backward (- -)", xlabel="T", ylabel="seconds")

    def batches(axes: Axes) -> None:
        _lines(axes, curves["decode"], "-", "")
        axes.set(title="a token", xlabel="B", ylabel="seconds")

    found = {}
    for name, drawn in zip(FIGURES, (lengths, batches), strict=True):
        (panel,) = draw(Figure(name, "", drawn), f"bench-{name}")
        found[f"bench-{name}.svg"] = panel.standalone
    return found


def _lines(axes: Axes, curves: dict[str, Curve], style: str, label: str | None) -> None:
    for name, curve in curves.items():
        words, colour = _NAMES[name]
        sizes, times = zip(*curve, strict=True)
        named = {} if label is None else {"label": label + words}
        axes.loglog(sizes, times, style, color=colour, marker=".", markersize=4, base=10, **named)
    axes.set_xscale("log", base=2)
    axes.legend()
