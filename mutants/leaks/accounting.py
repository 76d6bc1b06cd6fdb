"""Epsilon that is not what was spent: accountants told other numbers, calibration that overshoots."""

from mutants.mutant import mutant

COUNTS = "tests/privacy/test_accountants.py::"
CALIBRATES = "tests/privacy/test_calibrate.py::"
GAUSSIAN = COUNTS + "test_plain_gaussian_releases_cost_what_the_closed_form_says"

MUTANTS = [
    mutant(
        "one-step-fewer",
        "The accountant is told one step fewer",
        "privacy/plan.py",
        "                spends.append(Spend(phase.sampling_rate, noise, count))\n",
        "                spends.append(Spend(phase.sampling_rate, noise, max(1, count - 1)))\n",
        "tests/privacy/test_plan.py::test_the_spends_are_the_phases_and_stop_where_told",
    ),
    mutant(
        "warm-up-is-free",
        "The accountant is not told of the warm-up",
        "privacy/plan.py",
        "        spends = []\n        for phase in self.phases:\n",
        "        spends = []\n        for phase in self.phases[-1:]:\n",
        "tests/privacy/test_plan.py::test_the_spends_are_the_phases_and_stop_where_told",
    ),
    mutant(
        "no-clip-counts-as-private",
        "A phase without a clip is accounted for as if it had one",
        "privacy/plan.py",
        "noise = phase.noise_multiplier if phase.is_private else 0.0",
        "noise = phase.noise_multiplier or 1.0",
        "tests/privacy/test_plan.py::test_a_phase_without_clip_or_noise_makes_the_plan_non_private",
    ),
    mutant(
        "rate-halved-for-the-accountant",
        "The accountant is told half the sampling rate",
        "privacy/plan.py",
        "Spend(float(rate), float(noise), steps)",
        "Spend(float(rate) / 2, float(noise), steps)",
        COUNTS + "test_golden_values",
    ),
    mutant(
        "no-noise-costs-nothing",
        "A release without noise is left out of the account",
        "privacy/plan.py",
        "return known if is_private(known) else (Spend(1.0, 0.0, 1),)\n",
        "return tuple(spend for spend in known if spend.noise_multiplier > 0)\n",
        COUNTS + "test_nothing_costs_nothing_and_no_noise_costs_everything",
    ),
    mutant(
        "gaussians-compose-for-free",
        "Full-batch releases compose as if there were half as many",
        "privacy/accounting.py",
        "return 1, spend.noise_multiplier / math.sqrt(spend.steps)",
        "return 1, spend.noise_multiplier / math.sqrt(spend.steps / 2)",
        GAUSSIAN,
    ),
    mutant(
        "one-direction-only",
        "Adding a unit is not accounted for, only removing one (and the wrong way round)",
        "privacy/accounting.py",
        "((removal_divergence, first, last), (addition_divergence, -last, -first))",
        "((addition_divergence, -last, -first), (addition_divergence, -last, -first))",
        COUNTS + "test_golden_values",
    ),
    mutant(
        "rounding-not-taken-off",
        "The rounding of the Fourier transforms is not taken off delta",
        "privacy/accounting.py",
        "return ROUNDING * sum(_releases(spend)[0] for spend in spends)",
        "return 0.0",
        COUNTS + "test_rounding_in_long_compositions_never_takes_epsilon_below_the_truth",
        COUNTS + "test_a_delta_below_the_rounding_error_is_refused_with_the_remedy",
    ),
    mutant(
        "renyi-conversion",
        "The conversion from Renyi divergences forgets delta's order",
        "privacy/accounting.py",
        "r + np.log1p(-1 / a) - np.log(delta * a) / (a - 1)",
        "r + np.log1p(-1 / a) - np.log(delta * a) / a",
        COUNTS + "test_the_tight_conversion_is_that_of_the_library",
    ),
    mutant(
        "calibration-overshoots",
        "Calibration aims two percent above the budget",
        "privacy/calibration.py",
        "        limit=epsilon,\n",
        "        limit=1.02 * epsilon,\n",
        CALIBRATES + "test_golden_noise_for_epsilon_3",
    ),
    mutant(
        "delta-of-one-over-n",
        "The default delta is one over N: one record may be published outright",
        "methods/spec.py",
        "math.floor(-math.log10(10 * units))",
        "math.floor(-math.log10(units / 10))",
        "tests/training/test_fit.py::test_the_default_delta_is_a_power_of_ten_well_below_one_over_n",
    ),
    mutant(
        "edited-plans-are-run",
        "A plan that costs more than its target is run",
        "training/data.py",
        "    if plan.target_epsilon is not None and exceeds_target(plan, cost := plan_epsilon(plan)):\n",
        "    if plan.target_epsilon is not None and exceeds_target(plan, cost := plan_epsilon(plan)) and False:\n",
        "tests/training/test_identity.py::test_a_plan_that_costs_more_than_its_target_is_refused",
    ),
    mutant(
        "seeded-runs-for-release",
        "A seeded run is marked for release",
        "runs/record.py",
        "return self.seed is None and self.plan.is_private",
        "return self.plan.is_private",
        "tests/training/test_fit.py::test_a_seeded_run_is_marked_as_not_for_release",
    ),
]
