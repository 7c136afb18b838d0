"""Colours by role, light and dark: figures are drawn in the light ones and shown in whichever the reader has."""

from __future__ import annotations

LIGHT = {
    "paper": "#fdfcf9", "panel": "#f5f3ed", "ink": "#1f2328", "quiet": "#5c636b", "line": "#d9d6cd",
    "grid": "#e8e5dc", "link": "#1d5a9e", "pass": "#1b6e3c", "short": "#8a5a00", "fail": "#b3261e",
    "c0": "#2563a8", "c1": "#c2410b", "c2": "#2c7a4b", "c3": "#8b3fa0", "c4": "#92690c", "c5": "#0e7490",
}  # fmt: skip
DARK = {
    "paper": "#16181b", "panel": "#1e2125", "ink": "#e6e3dc", "quiet": "#a3a8ad", "line": "#3a3e44",
    "grid": "#2b2f34", "link": "#8ab8ee", "pass": "#72c794", "short": "#e0b25c", "fail": "#f28b82",
    "c0": "#7fb2ee", "c1": "#f29a6c", "c2": "#7ccf9b", "c3": "#d09be3", "c4": "#dcb95f", "c5": "#67c6dc",
}  # fmt: skip
CYCLE = ("c0", "c1", "c2", "c3", "c4", "c5")


def declarations(colours: dict[str, str]) -> str:
    """Return CSS custom properties, one a colour."""
    return " ".join(f"--{role}: {colour};" for role, colour in colours.items())
