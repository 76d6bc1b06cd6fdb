"""The audit table of docs/audit.md and README's line, made from the records."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsedp_experiments.runs.results import read_rows

ROOT = Path(__file__).resolve().parents[3]
BEGIN, END = "<!-- audits: made by `python -m sparsedp_experiments.audits` -->", "<!-- end of audits -->"
Records = Sequence[Mapping[str, Any]]


def update(results: Path, config: Mapping[str, Any]) -> None:
    """Write both."""
    found = read(results)
    for page, text in (("docs/audit.md", table(found, config)), ("README.md", line(found, config))):
        path = ROOT / page
        path.write_text(updated(path.read_text(), text))


def updated(text: str, made: str) -> str:
    """A page with what stands between its marks made anew."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    assert mark, f"there is no place for the audits ({BEGIN} ... {END})"
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def table(found: Mapping[str, Records], config: Mapping[str, Any]) -> str:
    """Claim and bounds by method, and how often honest code raised an alarm."""
    base = config["base"]
    lines = [
        f"{base['dataset']}, epsilon {base['epsilon']:g} at delta {base['delta']:g}, batches of "
        f"{base['batch_size']}, {config['steps']} steps, {found[config['methods'][0]][0]['dimension']:,} "
        f"coordinates, confidence {config['confidence']:g}. Median of {config['repeats']} audits (least to largest).",
        "",
        "| method | one step: claimed | shown | 200 steps: claimed | measured steps recomposed (no attack) | "
        "attacked in one go, GDP | by guesses |",
        "|---|---|---|---|---|---|---|",
    ]
    for method in config["methods"]:
        records = found[method]
        cells = [
            f"{records[0]['one_step']['claimed_epsilon']:.3f}",
            _spread([record["one_step"]["lower_bound"] for record in records]),
            f"{records[0]['claimed_epsilon']:.3f}",
            _spread([r["recomposed"] for r in records]),
            *(_spread([r["estimates"][name] for r in records]) for name in ("gdp", "guesses")),
        ]
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    alarms = found["alarms"]
    raised = sum(not record["passed"] for record in alarms)
    lines += [
        "",
        f"Of {len(alarms)} audits of honest code at a confidence of {config['alarms']['confidence']:g}, {raised} "
        f"raised an alarm; at most {(1 - config['alarms']['confidence']) * len(alarms):.0f} are to be expected.",
    ]
    return "\n".join(lines)


def line(found: Mapping[str, Records], config: Mapping[str, Any]) -> str:
    """README's line."""
    records = [record for method in config["methods"] for record in found[method]]
    share = [r["one_step"]["lower_bound"] / r["one_step"]["claimed_epsilon"] for r in records]
    whole = [r["lower_bound"] / r["claimed_epsilon"] for r in records]
    text = (
        "- **An audit anybody can run.** `sparsedp audit` attacks your plan, model and loading: on honest code it "
        f"shows {100 * min(share):.0f} to {100 * max(share):.0f} % of the claimed epsilon of a step; attacks on all "
        f"{config['steps']} steps show {100 * min(whole):.0f} to {100 * max(whole):.0f} %; planted leaks are all "
        "caught ([how](docs/audit.md))."
    )
    return textwrap.fill(text, 128, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def read(results: Path) -> dict[str, Records]:
    """The records by method, and those of honest code under "alarms"."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in read_rows(results):
        found.setdefault(row["experiment"].removeprefix("audit-"), []).append(row)
    return dict(found)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
