"""The style sheet inside every figure, and the names of its colours."""

from __future__ import annotations

_LIGHT = {
    "card": "#ffffff", "rule": "#dfe3e8", "ink": "#1b2027", "soft": "#59636f", "c0": "#6d7783", "c1": "#2f5fd0",
    "c2": "#c2500c", "c3": "#0d7068", "c4": "#7a45c9", "c5": "#b01d70", "c6": "#8a6d00",
}  # fmt: skip
_DARK = {
    "card": "#181c22", "rule": "#2b323b", "ink": "#e8ebef", "soft": "#a5afbb", "c0": "#98a3b0", "c1": "#86a9ff",
    "c2": "#ff9f6b", "c3": "#57d5c7", "c4": "#c0a2ff", "c5": "#f78dc7", "c6": "#e0c95a",
}  # fmt: skip

GREY, BLUE, ORANGE, TEAL, VIOLET, PINK, GOLD = (f"c{number}" for number in range(7))


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


_CLASSES = "".join(f".{name}{{--c:var(--{name})}}" for name in (GREY, BLUE, ORANGE, TEAL, VIOLET, PINK, GOLD))

SHEET = (
    f":root{{{_variables(_LIGHT)}}}"
    f"@media (prefers-color-scheme:dark){{:root{{{_variables(_DARK)}}}}}"
    "text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;fill:var(--soft);"
    "font-variant-numeric:tabular-nums}"
    ".card{fill:var(--card);stroke:var(--rule)}"
    ".title{font-weight:600;font-size:13px;fill:var(--ink)}"
    ".key{fill:var(--ink)}.axis{font-size:12px}.tick{font-size:11px}.note{font-size:11px}"
    ".middle{text-anchor:middle}.end{text-anchor:end}"
    ".grid{stroke:var(--rule);stroke-width:1}.floor{stroke:var(--soft);stroke-width:1}"
    ".level{stroke:var(--soft);stroke-width:1.3;stroke-dasharray:2 4}"
    f"{_CLASSES}"
    ".stroke{stroke:var(--c);stroke-width:2;stroke-linejoin:round;stroke-linecap:round}"
    ".dashed{stroke-dasharray:6 5}.dotted{stroke-dasharray:1.5 4}"
    ".dot{fill:var(--c)}.cloud{fill:none;stroke:var(--c);stroke-width:3.4;stroke-linecap:round;stroke-opacity:.55}"
    ".band{fill:var(--c);fill-opacity:.16}"
    ".bar{fill:var(--c)}.whisker{stroke:var(--c);stroke-width:1.5}"
)
"""Colours follow the reader's choice of light or dark."""
