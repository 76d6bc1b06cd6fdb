"""Noise that is missing, too small, repeated or known."""

from mutants.mutant import Edit, Mutant, mutant

NOISE = "        randomness.add_rounded_gaussian(grid.noise_bits, steps, key=charge.key)\n"
APART = "        noise = torch.zeros_like(steps)\n" + NOISE.replace(" steps,", " noise,")
ADDED = "        steps = steps + noise\n"
LARGE = "tests/privacy/test_noise_of_large_models.py::"
SECRET = "tests/training/test_secret_draws.py::"


def changed(name: str, leak: str, line: str, *caught_by: str) -> Mutant:
    """A leak that changes the noise once it is drawn."""
    return mutant(name, leak, "privacy/mechanism.py", NOISE, f"{APART}        {line}\n{ADDED}", *caught_by)


MUTANTS = [
    Mutant(
        "charge-after-noise",
        "A release is paid for after it was made",
        (
            Edit(
                "privacy/mechanism.py",
                "        ledger.charge(charge)\n        return grid",
                "        return grid",
            ),
            Edit("privacy/mechanism.py", NOISE, NOISE + "        ledger.charge(charge)\n"),
        ),
        ("tests/privacy/test_mechanism.py::test_the_ledger_is_charged_before_anything_is_computed_or_drawn",),
    ),
    mutant(
        "noise-thread-fails-unheard",
        "A thread that fails leaves its stretch of a long vector without noise, and the release is made",
        "randomness.py",
        "                done.result()\n",
        "                done.exception()\n",
        "tests/core/test_randomness.py::test_an_error_while_noise_is_drawn_is_not_swallowed",
    ),
    changed(
        "noise-on-the-first-100000",
        "Coordinates beyond the first 100,000 get no noise",
        "noise[100_000:] = 0",
        LARGE + "test_every_coordinate_of_a_large_model_gets_noise_of_its_own",
    ),
    changed(
        "noise-repeats-after-65536",
        "Noise repeats after 65,536 coordinates",
        "noise = noise[torch.arange(len(noise)) % 65_536]",
        LARGE + "test_every_coordinate_of_a_large_model_gets_noise_of_its_own",
    ),
    changed(
        "noise-negated-in-the-second-half",
        "The second half of the coordinates has the noise of the first, negated",
        "noise[len(noise) // 2 : len(noise) // 2 * 2] = -noise[: len(noise) // 2]",
        LARGE + "test_every_coordinate_of_a_large_model_gets_noise_of_its_own",
    ),
    changed(
        "noise-of-neighbours-correlated",
        "A coordinate's noise is half its neighbour's",
        "noise = ((noise + noise.roll(1)).double() / 2**0.5).round().long()",
        LARGE + "test_every_coordinate_of_a_large_model_gets_noise_of_its_own",
    ),
    changed(
        "one-coordinate-without-noise",
        "One coordinate in the middle gets no noise",
        "noise[len(noise) // 2 : len(noise) // 2 + 1] = 0",
        "tests/privacy/test_noise.py::test_every_coordinate_that_may_carry_signal_carries_noise",
        LARGE + "test_every_coordinate_of_a_large_model_gets_noise_of_its_own",
    ),
    changed(
        "noise-reused",
        "Every step has the noise of the first",
        "noise = globals().setdefault(f'kept{query.size}', noise)",
        "tests/privacy/test_noise.py::test_noise_differs_from_step_to_step",
    ),
    changed(
        "noise-follows-the-batch",
        "There is no noise where nothing is to be hidden",
        "noise = noise * int(bool(steps.any()))",
        "tests/privacy/test_mechanism.py::test_a_batch_that_contributes_nothing_releases_noise_alone",
    ),
    Mutant(
        "noise-from-the-public-seed",
        "The noise of an unseeded run follows from the seed in its record",
        (
            Edit(
                "privacy/mechanism.py",
                NOISE,
                APART + "        from sparsedp.randomness import PublicRandomness\n"
                "        fixed = PublicRandomness.fresh().normal(query.size, (charge.step,))\n"
                "        noise = (fixed * 2.0**grid.noise_bits).round().long()\n" + ADDED,
            ),
        ),
        (SECRET + "test_the_noise_of_an_unseeded_run_cannot_be_made_again_from_its_record",),
    ),
    mutant(
        "batches-from-the-public-seed",
        "The batches of an unseeded run follow from the seed in its record",
        "training/trainer.py",
        "lambda: Batches(dataset, plan, private, loading",
        "lambda: Batches(dataset, plan, SeededRandomness(public.seed), loading",
        SECRET + "test_the_batches_of_an_unseeded_run_cannot_be_made_again_from_its_record",
    ),
    mutant(
        "seeded-noise-for-release",
        "Releases with noise from a seed are marked for release",
        "randomness.py",
        '        """No."""\n        return False\n',
        '        """No."""\n        return True\n',
        "tests/core/test_randomness.py::test_only_the_system_source_is_for_release",
    ),
]
