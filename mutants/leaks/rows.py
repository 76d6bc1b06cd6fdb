"""Rows that reach each other: models that mix, randomness that follows a row's place, checks that look away."""

from mutants.mutant import mutant

MUTANTS = [
    mutant(
        "models-not-checked",
        "A model that mixes samples is trained",
        "training/guard.py",
        "        if modes != self._checked:\n",
        "        if False:\n",
        "tests/training/test_trainer.py::test_a_batch_norm_switched_on_after_the_start_is_refused",
    ),
    mutant(
        "witness-says-nothing",
        "A difference between a row's gradient alone and in company does not stop the step",
        "gradients/witness.py",
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
]
