"""The guarantee of a fit in words, on one page to print for a data-protection officer."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from math import ceil, floor
from pathlib import Path
from typing import Any

from sparsedp._files import write_atomically
from sparsedp._validate import rounded_up
from sparsedp.guarantee import describe, posterior

_STYLE = """
@page { size: A4; margin: 12mm 16mm }
body { font: 9.6pt/1.33 Arial, 'Liberation Sans', sans-serif; color: #111; max-width: 178mm; margin: 8mm auto }
@media print { body { margin: 0 auto; font-size: 9.1pt } }
h1 { font-size: 15pt; margin: 0 0 1mm } h2 { font-size: 10.4pt; margin: 2.6mm 0 .5mm } p, ul { margin: .5mm 0 1mm }
ul { padding-left: 5mm } .lead { font-size: 10.4pt } .lead b { white-space: nowrap }
.small { font-size: 8pt; color: #444 } .warn { border: 1.5pt solid #a00; padding: 1.5mm 3mm; margin: 2mm 0 }
table { border-collapse: collapse; margin: 1mm 0 } td, th { border: .5pt solid #999; padding: .5mm 3mm }
td, th { text-align: right } th:first-child, td:first-child { text-align: left }
"""
_CHANCES = (0.001, 0.01, 0.1, 0.5)


def write_guarantee(estimator: Any, path: Path) -> Path:
    """Write the page of a fitted estimator; says where it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, guarantee_page(estimator).encode())
    return path


def guarantee_page(estimator: Any) -> str:
    """The page: who is protected, from what, what epsilon means, what is not covered, how to check it."""
    plan = estimator.result_.plan
    # The promise is the target; what the plan costs is a little less.
    epsilon = max(float(estimator.epsilon_), float(plan.target_epsilon or 0.0))
    delta, units = float(estimator.delta_), int(estimator.n_units_)
    unit = "row of the table" if plan.unit == "row" else str(plan.unit)
    name = estimator.name or "the table"
    whole = (
        f"Each {unit} is protected with everything the training table holds about them, in all their rows."
        if plan.unit != "row"
        else "Each row is protected by itself. <b>Somebody with several rows is protected less: with m rows, about m "
        "times the epsilon.</b>"
    )
    warning = (
        ""
        if estimator.publishable_
        else "<p class=warn><b>Not for release.</b> This model was trained with a seed (random_state), so its noise "
        "can be computed again and subtracted. What follows holds for the same training without a seed.</p>"
    )
    after = [posterior(chance, epsilon) for chance in _CHANCES]
    table = _table(
        ("What an attacker believed before, from elsewhere", *(f"{chance:.1%}" for chance in _CHANCES)),
        (("can rise, with the model in hand, to at most", *(f"{ceil(most * 1e4) / 100:.2f}%" for _, most in after)),
         ("or can fall to at least", *(f"{floor(least * 1e4) / 100:.2f}%" for least, _ in after))),
    )  # fmt: skip
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<title>Privacy guarantee: {_text(name)}</title><style>{_STYLE}</style></head>
<body>
<h1>What this model can reveal about one {_text(unit)}</h1>
<p class=lead>{_kind(estimator)} trained on {_text(name)} with differential privacy:
<b>epsilon = {_rounded(epsilon)}</b>, <b>delta = {delta:g}</b>, <b>N = {units:,}</b>.</p>{warning}
<h2>Who is protected</h2>
<p>{whole} All {units:,} are protected alike, whether their data is ordinary or rare.</p>
<h2>From what</h2>
<p>From anybody who holds the trained model, all its numbers and this page, and who may know everything about
everybody else in the table. Random noise was added at every step of training. What such a person can conclude
about one {_text(unit)} is nearly the same as if that {_text(unit)} had never been in the table: whether they are
in it, and what is written there. This holds whatever is done with the model later, by any means, known today or
not.</p> <h2>What epsilon = {_rounded(epsilon)} means here</h2>
<p>No conclusion becomes more than e<sup>{_rounded(epsilon)}</sup>
= {_rounded(math.exp(epsilon))} times as likely because
of one {_text(unit)}. For the belief that a certain {_text(unit)} is in the table (or any other such statement):</p>
{table}
<p>This may fail with a probability of at most delta = {delta:g} for each {_text(unit)}; times N = {units:,} that is
{units * delta:.2g} {_text(unit)}s expected at most in the whole table{_delta_words(units * delta)}. Epsilon is an
upper bound for the worst case; {_judgement(epsilon)}</p>
<h2>What is not covered</h2>
{_list(_limits(estimator, plan, unit))}
<h2>What had to be public</h2>
<p>Taken as known to everybody, and not from the data: the number {units:,}, the names of the columns, their
bounds and levels {_described(estimator)}, {_targets(estimator)}, and every setting of the training.</p>
<h2>How it was verified</h2>
{_list(_verified(estimator, plan))}
<p class=small>{_text(estimator.guarantee_)} Relation: one {_text(unit)} added or removed; replacing one by
another is two such changes. Method {_text(plan.method)}, accountant {_text(plan.accountant)},
{plan.total_steps:,} noisy steps of about {plan.expected_batch_size(plan.phases[-1]):.0f} {_text(unit)}s each,
each one's contribution limited to norm {plan.phases[-1].clip_norm:g}, noise multiplier
{plan.phases[-1].noise_multiplier:.3g}. Written by sparsedp.</p>
</body></html>
"""


def _limits(estimator: Any, plan: Any, unit: str) -> Sequence[str]:
    """What the guarantee does not say."""
    found = [
        "What is true of people in general. If the model learns that smoking goes with lung disease, it says "
        "something about every smoker, also about those who were never in the table.",
        "The raw data itself, copies of it, backups, and the computer it was trained on: they need the usual care.",
        f"Groups. For a family of three {_text(unit)}s, who are alike, epsilon is three times as large, and delta "
        "larger still.",
    ]  # fmt: skip
    if estimator.budget is not None:
        found.append(
            f"All fits that draw from the same PrivacyBudget stay within it: {_text(str(estimator.budget))}."
        )
    return [*found, *map(_text, describe(plan, evaluated=bool(estimator.result_.metrics)).limitations)]


def _verified(estimator: Any, plan: Any) -> Sequence[str]:
    result = estimator.result_
    found = [
        f"Epsilon was computed before training from the plan, by the accountant {_text(plan.accountant)} "
        "(PLD and RDP are "
        "published, independent methods), and the noise was set so that it cannot be exceeded.",
        f"{result.ledger.steps:,} of {result.ledger.planned:,} planned releases were charged to a ledger; "
        "their cost is "
        f"epsilon = {_rounded(result.ledger.epsilon)}.",
    ]
    if estimator.run_dir is not None:
        found.append(
            "Anybody can check the files of the run again: <code>sparsedp verify "
            f"{_text(str(estimator.run_dir))}</code> "
            "recomputes the plan, the ledger's chain of hashes and epsilon; <code>sparsedp audit</code> "
            "attacks the mechanism."
        )
    else:
        found.append("No run directory was kept (run_dir=...), so nobody can check the ledger afterwards.")
    return found


def _kind(estimator: Any) -> str:
    what = "classification" if hasattr(estimator, "classes_") else "regression"
    if not hasattr(estimator, "coef_"):
        return f"A neural network for {what}"
    name = "Logistic regression" if what == "classification" else "Linear regression"
    return f"{name} with bends (an additive model)" if estimator.model == "additive" else name


def _described(estimator: Any) -> str:
    if estimator.columns is not None:
        return f"(as described for {len(estimator.columns)} columns)"
    return "(as given by the bounds)" if estimator.bounds is not None else "(no bounds were given)"


def _targets(estimator: Any) -> str:
    if not hasattr(estimator, "classes_"):
        low, high = estimator.target_bounds
        return f"the bounds of the target ({low:g} to {high:g})"
    if estimator.classes is None:
        return "the classes of the target (<b>read off the data, which a rare class makes unsafe</b>)"
    return f"the {len(estimator.classes_)} classes of the target"


def _delta_words(expected: float) -> str:
    return "" if expected < 0.5 else " <b>(delta is large for this N; 1/(10 N) or less is usual)</b>"


def _judgement(epsilon: float) -> str:
    if epsilon <= 1:
        return "1 or less is commonly called strong."
    if epsilon <= 3:
        return "1 to 3 is commonly used for sensitive data and called moderate to strong."
    if epsilon <= 10:
        return "above 3 the bound alone promises little for likely attackers; it still excludes certainty."
    return "above 10 the bound promises little; treat the model as confidential."


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    rows = [
        "".join(f"<th>{cell}</th>" for cell in head),
        *("".join(f"<td>{cell}</td>" for cell in row) for row in body),
    ]
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def _list(items: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"


def _text(value: str) -> str:
    return html.escape(str(value))


def _rounded(value: float) -> str:
    """A number rounded up to three digits: a guarantee is never rounded down."""
    return rounded_up(value, 3)
