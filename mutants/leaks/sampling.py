"""Batches that are not what the accountant was told: Poisson, at the planned rate, every unit by its own coin."""

from mutants.mutant import mutant

DRAW = "known = self._share.draw(self._randomness, self._rate, self._held, self._bits, step)"
TESTS = "tests/sampling/test_sampling.py::"

MUTANTS = [
    mutant(
        "fixed-size-batches",
        "Every batch has the same number of units",
        "sampling.py",
        DRAW,
        "known = np.sort(self._randomness.below(np.full(self._held, 2**40), key=(step,)).argsort()"
        "[: max(1, round(self._rate * self._held))])",
        TESTS + "test_every_row_joins_every_step_at_exactly_the_rate",
        TESTS + "test_rows_are_independent_of_each_other",
    ),
    mutant(
        "rate-a-tenth-too-high",
        "Units are sampled a tenth more often than planned",
        "sampling.py",
        DRAW,
        DRAW.replace("self._rate,", "min(1.0, 1.1 * self._rate),"),
        TESTS + "test_every_row_joins_every_step_at_exactly_the_rate",
    ),
    mutant(
        "neighbours-share-a-coin",
        "Units are sampled in pairs of neighbours",
        "sampling.py",
        DRAW,
        "coins = self._randomness.bernoulli(self._rate, self._held, key=(step,))\n"
        "        known = np.flatnonzero(coins[np.arange(len(coins)) // 2 * 2])",
        TESTS + "test_rows_are_independent_of_each_other",
    ),
    mutant(
        "two-units-far-apart-share-a-coin",
        "The last unit is sampled whenever the first one is",
        "sampling.py",
        DRAW,
        "coins = self._randomness.bernoulli(self._rate, self._held, key=(step,)).copy()\n"
        "        coins[-1] = coins[0]\n"
        "        known = np.flatnonzero(coins)",
        "tests/auditing/test_audit.py::test_an_honest_step_is_bounded_closely_and_never_beyond_its_claim[dp-sgd]",
    ),
    mutant(
        "the-same-batch-again",
        "Every step of a phase has the batch of its first step",
        "sampling.py",
        "                drawn = self._draw(step)\n",
        "                drawn = self._draw(first_step) if step == first_step else drawn\n",
        TESTS + "test_every_row_joins_every_step_at_exactly_the_rate",
    ),
    mutant(
        "rows-sampled-not-units",
        "Rows are sampled where patients are promised",
        "sampling.py",
        "        return self._rows if self._index is None else self._index.count\n",
        "        return self._rows\n",
        TESTS + "test_units_are_counted_not_rows",
    ),
    mutant(
        "more-rows-of-a-unit-than-told",
        "A sampled unit gives one row more than it may",
        "sampling.py",
        "kept[within < self._rows_per_unit]",
        "kept[within <= self._rows_per_unit]",
        TESTS + "test_several_rows_of_a_unit_are_distinct_and_all_equally_likely",
    ),
    mutant(
        "another-number-of-units",
        "A plan for more units than there are is accepted: the rate is not the planned one",
        "training/data.py",
        "    if plan.units != units:\n",
        "    if False:\n",
        "tests/training/test_trainer.py::test_units_are_sampled_as_units",
    ),
    mutant(
        "any-batch-is-taken",
        "The trainer steps on batches that its sampler did not draw",
        "training/trainer.py",
        "        if self._issued.pop(self.position, None) is not batch:\n",
        "        if self._issued.pop(self.position, None) is not batch and False:\n",
        "tests/training/test_trainer.py::test_a_batch_that_was_not_drawn_by_the_trainer_is_refused",
    ),
]
