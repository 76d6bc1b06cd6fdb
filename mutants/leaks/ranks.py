"""Several processes that are not one: units drawn twice or by nobody, noise in the wrong place."""

from mutants.mutant import Edit, Mutant, mutant

SHARING = "tests/sampling/test_sharing.py::"
EXCHANGE = "tests/ranks/test_exchange.py::"
SHARDS = "tests/ranks/test_shards.py::"

MUTANTS = [
    Mutant(
        "unit-owned-twice",
        "Two ranks own the units of one block",
        (
            Edit(
                "sampling.py",
                "range(rank << bits, units, ranks << bits)",
                "range(0, units, 1 << bits)",
            ),
            Edit("sampling.py", "(units >> bits) % self.ranks == self.rank", "units >= 0"),
        ),
        (SHARING + "test_the_union_over_ranks_is_poisson_without_a_seed",),
    ),
    mutant(
        "shards-share-coins",
        "Shards of a seeded run throw the same coins",
        "sampling.py",
        "        return (step, _SHARD_DRAWS, self.rank)\n",
        "        return (step, _SHARD_DRAWS)\n",
        SHARING + "test_the_seeded_shards_of_one_run_throw_different_coins",
    ),
    mutant(
        "every-rank-draws-noise",
        "Ranks that follow can draw noise, so a release past the exchange goes unnoticed",
        "ranks/group.py",
        "        return private if self.leads else FollowerRandomness(private)\n",
        "        return private\n",
        EXCHANGE + "test_a_rank_that_follows_has_no_noise",
    ),
    mutant(
        "sum-handed-out-before-the-noise",
        "Rank 0 hands out the sum itself",
        "ranks/exchange.py",
        "                    got[CONTROL:] = release(sent[CONTROL:])\n",
        "                    got[CONTROL:] = sent[CONTROL:]\n                    release(sent[CONTROL:])\n",
        EXCHANGE + "test_what_is_handed_out_is_the_release",
    ),
    mutant(
        "the-same-rows-on-every-rank",
        "Ranks that were to give shards give all rows each, and every row is drawn and bounded once a rank",
        "training/recorder.py",
        "        refuse_shared_rows(ranks, dataset, loading.collate)\n",
        "        pass\n",
        SHARDS + "test_ranks_that_hold_the_same_rows_are_refused",
    ),
]
