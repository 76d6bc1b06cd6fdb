"""Verdicts on hand-made records: pairing, pooling, and when a claim holds, fails, or stays open."""

import math

import numpy as np
import pytest
from handmade import make_study
from scipy import stats

from sparsedp.errors import SparseDPError
from sparsedp_experiments.runs.claims import (
    Claim,
    Evidence,
    Part,
    Ruling,
    Verdict,
    above,
    equal,
    judge,
    no_loss,
    parts_of,
    pooled,
    read_claims,
)
from sparsedp_experiments.runs.page import summary
from sparsedp_experiments.runs.results import Estimate, estimate

NOISE = np.random.default_rng(0).normal(0, 0.01, (2, 3, 10))
LEARNED = Evidence("small", ({"method": "tp-topk"},), ({"method": "tp-rand"},))


def claims_from(tmp_path, text):
    file = tmp_path / "claims.toml"
    file.write_text(text)
    return read_claims(file)


def claim_text(kind="above", evidence="", margin=0.0):
    return (
        f'[[claim]]\nid = "c"\npaper = "p"\nwhere = "w"\nsays = "s"\ndecides = "d"\nkind = "{kind}"\n'
        f"margin = {margin}\nevidence = [{{ {evidence} }}]\n"
    )


def plain_claim(tmp_path, kind="above", margin=0.0):
    evidence = 'experiment = "small", better = { method = "tp-topk" }, worse = { method = "tp-rand" }'
    return claims_from(tmp_path, claim_text(kind, evidence, margin))[0]


def noisy(gain):
    """Cells that share a large wobble by seed, and a gain of tp-topk over the others."""

    def score(cell, seed):
        row, column = (
            ["1", "3"].index(cell["epsilon"]),
            ["dp-sgd", "tp-rand", "tp-topk"].index(cell["method"]),
        )
        better = gain if cell["method"] == "tp-topk" else 0.0
        return 0.8 + 0.05 * seed + better + 0.1 * NOISE[row, column, seed]

    return score


def test_a_part_is_the_paired_difference_of_scipy(tmp_path):
    study = make_study(tmp_path, noisy(0.01))
    first, second = parts_of(LEARNED, study, "accuracy")
    assert [dict(part.place) for part in (first, second)] == [{"epsilon": "1"}, {"epsilon": "3"}]
    for row, part in enumerate((first, second)):
        ours = [0.8 + 0.05 * seed + 0.01 + 0.1 * NOISE[row, 2, seed] for seed in range(3)]
        theirs = [0.8 + 0.05 * seed + 0.1 * NOISE[row, 1, seed] for seed in range(3)]
        interval = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
        found = estimate([part.values[seed] for seed in sorted(part.values)])
        assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_pooling_takes_one_value_per_seed_the_mean_over_cells(tmp_path):
    parts = parts_of(LEARNED, make_study(tmp_path, noisy(0.01)), "accuracy")
    values = [np.mean([part.values[seed] for part in parts]) for seed in range(3)]
    found = pooled(parts)
    assert found is not None
    interval = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found[0].low, found[0].high) == pytest.approx((interval.low, interval.high))
    assert (found[0].count, found[1]) == (3, 2)


def test_pooling_uses_the_seeds_all_cells_share_and_waits_for_cells_with_one():
    full, two = Part("a", {"x": "1"}, {0: 1.0, 1: 2.0, 2: 3.0}), Part("a", {"x": "2"}, {0: 3.0, 1: 4.0})
    one = Part("a", {"x": "3"}, {0: 100.0})
    found = pooled([full, two, one])
    assert found is not None
    assert (found[0].mean, found[0].count, found[1]) == (2.5, 2, 2)
    alone = pooled([one])
    assert alone is not None
    assert alone[0].low is None
    assert pooled([]) is None
    assert pooled([Part("a", {}, {0: 1.0, 1: 1.0}), Part("b", {}, {2: 1.0, 3: 1.0})]) is None


def test_a_gap_of_gaps_is_the_first_gap_less_the_second(tmp_path):
    gains = {("1", "tp-topk"): 0.05, ("3", "tp-topk"): 0.01}
    study = make_study(tmp_path, lambda cell, seed: 0.5 + gains.get((cell["epsilon"], cell["method"]), 0.0))
    contrast = Evidence("small", LEARNED.better, LEARNED.worse, {"epsilon": "1"}, {"epsilon": "3"})
    (part,) = parts_of(contrast, study, "accuracy")
    assert part.place == {}
    assert part.values == pytest.approx({0: 0.04, 1: 0.04, 2: 0.04})


def test_lists_are_means_and_only_restricts_the_places(tmp_path):
    level = {"dp-sgd": 0.1, "tp-rand": 0.3, "tp-topk": 0.6}
    study = make_study(tmp_path, lambda cell, seed: level[cell["method"]])
    rest = ({"method": "dp-sgd"}, {"method": "tp-rand"})
    (part,) = parts_of(Evidence("small", LEARNED.better, rest, only={"epsilon": ("3",)}), study, "accuracy")
    assert part.place == {"epsilon": "3"}
    assert part.values[0] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("rule", "low", "high", "ruling"),
    [
        (above, 0.001, 0.02, Ruling.HOLDS),
        (above, 0.001, 0.005, Ruling.SLIGHT),
        (above, -0.02, -0.001, Ruling.FAILS),
        (above, -0.001, 0.02, Ruling.OPEN),
        (above, -0.02, 0.001, Ruling.OPEN),
        (above, -0.001, 0.0049, Ruling.LEVEL),
        (above, -0.0049, 0.0, Ruling.LEVEL),
        (above, 0.0, 0.0, Ruling.BLIND),
        (equal, -0.004, 0.003, Ruling.HOLDS),
        (equal, 0.006, 0.009, Ruling.FAILS),
        (equal, -0.009, -0.006, Ruling.FAILS),
        (equal, 0.001, 0.006, Ruling.OPEN),
        (equal, -0.006, 0.001, Ruling.OPEN),
        (no_loss, -0.004, 0.02, Ruling.HOLDS),
        (no_loss, -0.02, -0.006, Ruling.FAILS),
        (no_loss, -0.006, 0.001, Ruling.OPEN),
    ],
)
def test_a_ruling_follows_from_the_interval_and_the_margin(rule, low, high, ruling):
    assert rule(Estimate(3, (low + high) / 2, 0.01, low, high), 0.005) is ruling


@pytest.mark.parametrize("rule", [above, equal, no_loss])
@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5]])
def test_fewer_than_three_seeds_decide_nothing(rule, values):
    assert rule(estimate(values), 0.9) is Ruling.OPEN


@pytest.mark.parametrize(
    ("gain", "ruling"), [(0.03, Ruling.HOLDS), (-0.03, Ruling.FAILS), (0.0, Ruling.LEVEL)]
)
def test_a_claim_is_judged_from_the_records(tmp_path, gain, ruling):
    studies = {"small": make_study(tmp_path, noisy(gain))}
    verdict = judge(plain_claim(tmp_path), studies)
    assert verdict.ruling is ruling
    assert verdict.used == len(verdict.parts) == 2
    assert verdict.pooled is not None
    assert verdict.pooled.mean == pytest.approx(gain, abs=0.003)


def test_nothing_run_is_said_to_be_not_run(tmp_path):
    assert judge(plain_claim(tmp_path), {}).ruling is Ruling.NOT_RUN
    studies = {"small": make_study(tmp_path, lambda cell, seed: None)}
    assert judge(plain_claim(tmp_path), studies).ruling is Ruling.NOT_RUN


def best_claim(tmp_path):
    evidence = 'experiment = "small", best = { method = "tp-topk" }, among = ["method"]'
    return claims_from(tmp_path, claim_text("best", evidence))[0]


@pytest.mark.parametrize(
    ("level", "ruling", "rival"),
    [
        ({"tp-topk": 0.9, "tp-rand": 0.8, "dp-sgd": 0.7}, Ruling.HOLDS, "method tp-rand"),
        ({"tp-topk": 0.8, "tp-rand": 0.7, "dp-sgd": 0.9}, Ruling.FAILS, "method dp-sgd"),
        ({"tp-topk": 0.8, "tp-rand": 0.7999, "dp-sgd": 0.6}, Ruling.OPEN, "method tp-rand"),
    ],
)
def test_the_best_must_lead_all_others_and_falls_to_any(tmp_path, level, ruling, rival):
    def score(cell, seed):
        column = list(level).index(cell["method"])
        return level[cell["method"]] + NOISE[0, column, seed]

    verdict = judge(best_claim(tmp_path), {"small": make_study(tmp_path, score)})
    assert (verdict.ruling, verdict.rival) == (ruling, rival)


def test_the_best_cannot_hold_while_a_rival_is_not_run(tmp_path):
    def score(cell, seed):
        level = {"tp-topk": 0.9, "tp-rand": 0.8}.get(cell["method"])
        return None if level is None else level + NOISE[0, 0, seed] * (cell["method"] == "tp-topk")

    assert judge(best_claim(tmp_path), {"small": make_study(tmp_path, score)}).ruling is Ruling.OPEN


def test_leads_of_the_best_are_widened_for_the_number_of_rivals(tmp_path):
    study = make_study(tmp_path, noisy(0.0))
    verdict = judge(best_claim(tmp_path), {"small": study})
    values = [np.mean([part.values[seed] for part in verdict.parts]) for seed in range(3)]
    half = stats.t.ppf(1 - 0.05 / 2 / 2, 2) * np.std(values, ddof=1) / math.sqrt(3)  # two rivals
    assert verdict.pooled is not None
    assert verdict.pooled.high - verdict.pooled.mean == pytest.approx(half)


def test_claims_of_unknown_kind_or_with_an_id_twice_are_refused(tmp_path):
    with pytest.raises(SparseDPError, match="claim c"):
        claims_from(tmp_path, claim_text("better"))
    with pytest.raises(SparseDPError, match="twice"):
        claims_from(tmp_path, claim_text().replace("evidence = [{  }]", "evidence = []") * 2)


def test_the_committed_claims_cover_the_papers_and_ours():
    claims = read_claims()
    assert {claim.paper for claim in claims} == {"TP-TopK", "RS", "AdaDPIGU", "ours"}
    assert all(claim.margin == 0.005 for claim in claims if claim.kind in ("equal", "no-loss"))


def open_verdict(values, beware=""):
    claim = Claim("c", "p", "w", "It pays.", "d", (), beware=beware)
    return Verdict(claim, Ruling.OPEN, estimate(values), (), 1)


def test_an_open_claim_stands_on_the_first_page_with_the_seeds_that_would_tell():
    values = [0.012, -0.004, 0.013]
    mean, std = np.mean(values), np.std(values, ddof=1)
    needed = next(n for n in range(3, 200) if stats.t.interval(0.95, n - 1, mean, std / math.sqrt(n))[0] > 0)
    text = "\n".join(summary([open_verdict(values, "Mind the gap.")]))
    assert "What is not resolved, and why" in text
    assert f"3 seeds; at this spread about {needed} would tell the sign. Mind the gap." in text


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([0.01, 0.02], "Fewer than three seeds."),
        ([0.004, 0.0045, 0.0055], "With 3 seeds it is not zero"),
        ([0.0001, -0.01, 0.01], "100 seeds would not tell its sign"),
    ],
)
def test_what_keeps_a_claim_open_is_said(values, reason):
    assert reason in "\n".join(summary([open_verdict(values)]))
