"""Rounds that are not what the accountant was told: who takes part, how long an update is, whose the noise is."""

from mutants.mutant import mutant

ROUNDS = "tests/federated/test_federated_rounds.py::"
COUNTS = "tests/federated/test_federated_counts.py::"

MUTANTS = [
    mutant(
        "server-trusts-clients-to-clip",
        "The server adds up clients' updates as they come, however long",
        "privacy/queries.py",
        "        if float(norm) <= bound:\n",
        "        if float(norm) <= bound or True:\n",
        ROUNDS + "test_a_huge_update_is_shortened_and_named",
    ),
    mutant(
        "noise-left-to-the-clients",
        "The server releases the clients' sum without noise of its own",
        "privacy/mechanism.py",
        "        randomness.add_rounded_gaussian(grid",
        "        if type(query).__name__ != 'UpdateSum':\n            randomness.add_rounded_gaussian(grid",
        ROUNDS + "test_the_noise_is_the_servers_and_of_the_planned_size",
    ),
    mutant(
        "a-fixed-number-of-clients",
        "Every round has the same number of clients, as Flower's own sampling does",
        "federated/picking.py",
        "    coins = randomness.bernoulli(sampling_rate, clients, key=(step,))\n",
        "    coins = np.argsort(randomness.below(np.full(clients, 2**40), key=(step,))) < sampling_rate * clients\n",
        ROUNDS + "test_clients_are_picked_by_their_own_coins",
    ),
    mutant(
        "uninvited-clients-count",
        "A client that was not picked can add its update",
        "federated/replies.py",
        'why = "it was not picked" if client not in round_.clients else _wrong(answer, round_.task)',
        "why = _wrong(answer, round_.task)",
        ROUNDS + "test_who_was_not_picked_cannot_add_anything",
    ),
    mutant(
        "the-client-does-not-clip",
        "A client sends its update as long as it is",
        "privacy/queries.py",
        "    factor = clip.tightened(grid.bound).factors(torch.linalg.vector_norm(values))\n",
        "    factor = values.isfinite().all().to(values.dtype)\n",
        ROUNDS + "test_an_honest_client_keeps_to_the_clip_norm",
    ),
    mutant(
        "other-clients-in-the-second-round",
        "A step that counts rows asks other clients for updates than it counted",
        "federated/server.py",
        "        picked = self._step.picked\n",
        "        picked = pick(self.plan.units, phase.sampling_rate, self._private, self.position)\n",
        COUNTS + "test_a_step_that_counts_asks_the_same_clients_twice",
    ),
]
