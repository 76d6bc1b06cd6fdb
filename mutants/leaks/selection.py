"""Selections that cost more than is charged, or choose by what was never released."""

from mutants.mutant import Edit, Mutant, mutant

STEP = "tests/training/test_adafest.py::"
COUNT = "tests/training/test_selection.py::"

MUTANTS = [
    mutant(
        "count-not-bounded",
        "A unit that touches many rows moves their counts by more than one",
        "privacy/queries.py",
        "clip.factors(norms)[owners]",
        "torch.ones(len(owners), dtype=torch.float64)",
        COUNT + "test_a_whole_unit_moves_the_count_by_at_most_one",
    ),
    mutant(
        "texts-count-one-by-one",
        "Every record of a unit counts as a unit of its own",
        "grad_sample/touched.py",
        "samples if batch.units is None else batch.units.cpu()[samples]",
        "samples",
        COUNT + "test_a_whole_unit_moves_the_count_by_at_most_one",
    ),
    mutant(
        "second-release-is-free",
        "A step that also counts rows gives all of its noise to the gradient",
        "privacy/plan.py",
        "return self.noise_multiplier / math.sqrt(1 - self.count_share)",
        "return self.noise_multiplier",
        STEP + "test_both_releases_are_one_charge_and_the_plan_says_how_it_is_shared",
    ),
    mutant(
        "releases-not-added-up",
        "The releases of one step are not held against its charge together",
        "privacy/ledger.py",
        "        self._precision = precision\n",
        "        self._precision = 0.0\n",
        STEP + "test_releases_that_cost_more_than_the_step_are_refused_before_they_are_made",
    ),
    mutant(
        "rows-by-raw-counts",
        "A step's rows are chosen by their counts without noise",
        "privacy/mechanism.py",
        "        randomness.add_rounded_gaussian(grid",
        "        if charge.release == 0:\n            randomness.add_rounded_gaussian(grid",
        STEP + "test_a_step_is_the_papers_algorithm",
    ),
    mutant(
        "selection-without-noise",
        "The count that a selection ranks by, made once before training, gets no noise",
        "privacy/mechanism.py",
        "        randomness.add_rounded_gaussian(grid",
        '        if charge.phase != "select":\n            randomness.add_rounded_gaussian(grid',
        "tests/auditing/test_other_releases.py::test_an_honest_release_passes_and_is_named_in_the_result[fest]",
    ),
    mutant(
        "same-noise-twice",
        "A step's count and its gradient have the same noise",
        "privacy/ledger.py",
        "return (self.step, self.release) if self.release else (self.step,)",
        "return (self.step,)",
        STEP + "test_the_two_releases_of_a_step_have_noise_of_their_own",
    ),
    Mutant(
        "mixture-of-raw-sums",
        "The mixture that tp-adaptive chooses and shrinks by is fitted to sums without noise",
        (
            Edit(
                "privacy/mechanism.py",
                "            yield self.engine.clipped_sum([batch], query)\n",
                "            raw = self.engine.clipped_sum([batch], query)\n"
                "            type(self).raw = raw.detach().clone()\n"
                "            yield raw\n",
            ),
            Edit(
                "methods/support_scheduler.py",
                "            return observe_dense(released)\n",
                "            seen = observe_dense(released)\n"
                "            from sparsedp.privacy import mechanism\n\n"
                "            adaptive = isinstance(self._ranking, EmpiricalBayes)\n"
                "            raw = getattr(mechanism._GradientSum, 'raw', seen.gradient)\n"
                "            return Observation(raw.double(), seen.noise_variance) if adaptive else seen\n",
            ),
        ),
        (
            "tests/methods/test_method_conformance.py::"
            "test_non_interference_the_data_reaches_the_controller_only_through_releases[tp-adaptive]",
        ),
    ),
]
