"""Rows that reach each other: models that mix, randomness that follows a row's place, checks that look away."""

from mutants.mutant import mutant

CHANCE = "tests/grad_sample/test_chance.py::"
FEATURES = "tests/training/test_features.py::"

MUTANTS = [
    mutant(
        "models-not-checked",
        "A model that mixes samples is trained",
        "guards/guard.py",
        "        if modes != self._checked:\n",
        "        if False:\n",
        "tests/training/test_trainer.py::test_a_batch_norm_switched_on_after_the_start_is_refused",
    ),
    mutant(
        "witness-says-nothing",
        "A difference between a row's gradient alone and in company does not stop the step",
        "grad_sample/witness.py",
        "            if differing >= min(2, len(self._kept.rows)):\n",
        "            if False:\n",
        "tests/training/test_company_guard.py::"
        "test_a_model_that_begins_to_mix_stops_the_run_within_an_epoch_and_before_the_release",
    ),
    mutant(
        "no-witness",
        "No step is looked at while training",
        "training/step.py",
        "self.company.engine_for(step)",
        "self.engine",
        "tests/training/test_company_guard.py::"
        "test_a_model_that_begins_to_mix_stops_the_run_within_an_epoch_and_before_the_release",
    ),
    mutant(
        "randomness-by-place",
        "Dropout masks follow a row's place in the batch: one row more shifts everybody's",
        "grad_sample/keyed.py",
        "rows = None if draw.axis is None else self.chance.rows",
        "rows = None if draw.axis is None else torch.arange(len(self.chance.rows))",
        CHANCE + "test_the_attacked_model_moves_by_c_and_not_by_fifty",
        CHANCE + "test_one_record_moves_the_sum_by_the_clip_norm_at_most_wherever_it_stands",
    ),
    mutant(
        "randomness-that-anybody-knows",
        "The secret that dropout masks follow from is a constant",
        "randomness.py",
        "return StepSecret(_random_bytes(SEED_BYTES))",
        "return StepSecret(bytes(SEED_BYTES))",
        CHANCE + "test_system_secrets_are_fresh_and_never_shown",
    ),
    mutant(
        "the-same-masks-in-every-row",
        "All rows share one dropout mask",
        "grad_sample/keyed.py",
        "rows = None if draw.axis is None else self.chance.rows",
        "rows = None if draw.axis is None else torch.zeros_like(self.chance.rows)",
        CHANCE + "test_rows_steps_and_draws_have_nothing_to_do_with_each_other",
        CHANCE + "test_keyed_numbers_have_pytorchs_distribution",
    ),
    mutant(
        "features-of-a-body-that-mixes",
        "What a frozen body makes of rows in each other's company is trained on",
        "training/data.py",
        "        _check_rows_are_computed_alone(body, tensors[0][0])\n",
        "",
        FEATURES + "test_a_body_that_is_no_function_of_a_row_is_refused",
    ),
    mutant(
        "features-by-a-collate-that-mixes",
        "A collate that mixes rows makes the features",
        "training/data.py",
        "    validate_collate(dataset, collate, FixedShapes())\n",
        "",
        FEATURES + "test_a_collate_that_mixes_rows_is_refused",
    ),
    mutant(
        "counts-unwatched",
        "A model that mixes samples where no trial looked moves the count of rows by hundreds",
        "grad_sample/touched.py",
        "        for place in self._next_places(batch.row_count):\n",
        "        for place in ():\n",
        "tests/training/test_selection.py::"
        "test_samples_that_mix_where_no_trial_looked_are_found_while_they_are_counted",
    ),
    mutant(
        "zero-times-infinity-of-another-row",
        "A row that is not finite makes NaN of the others where an operation's own backward sees all rows at once",
        "grad_sample/bookkeeping.py",
        "        if any(use.may_have_spread for use in uses):\n",
        "        if False:\n",
        "tests/grad_sample/test_extreme_rows.py::test_one_such_row_silences_no_other[pow-nan]",
    ),
    mutant(
        "a-units-rows-by-place",
        "Rows of ragged units are added up with those of the next",
        "grad_sample/layers/unit_rows.py",
        "return cls(count, most, units * most + within)",
        "return cls(count, most, torch.arange(units.numel(), device=units.device))",
        "tests/grad_sample/test_unit_rows.py::test_the_clipped_sum_is_that_of_a_plain_loop",
    ),
]
