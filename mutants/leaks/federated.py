"""Rounds that are not what the accountant was told: who takes part, how long an update is, whose the noise is."""

from mutants.mutant import mutant

ROUNDS = "tests/federated/test_federated_rounds.py::"
COUNTS = "tests/federated/test_federated_counts.py::"
LIARS = "tests/federated/test_federated_liars.py::"

MUTANTS = [
    mutant(
        "server-trusts-clients-to-clip",
        "The server adds up clients' updates as they come, however long",
        "privacy/updates.py",
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
        'why = "it was not picked" if client not in round_.tasks else _wrong(answer, round_.task)',
        "why = _wrong(answer, round_.task)",
        ROUNDS + "test_who_was_not_picked_cannot_add_anything",
    ),
    mutant(
        "the-client-does-not-clip",
        "A client sends its update as long as it is",
        "privacy/updates.py",
        "    factor = clip.tightened(grid.bound).factors(torch.linalg.vector_norm(values))\n",
        "    factor = values.isfinite().all().to(values.dtype)\n",
        ROUNDS + "test_an_honest_client_keeps_to_the_clip_norm",
    ),
    mutant(
        "other-clients-in-the-second-round",
        "A step that counts rows asks other clients for updates than it counted",
        "federated/server.py",
        "        picked, counted = self._step.picked, bool(self._step.done)\n",
        "        picked = pick(self.plan.units, phase.sampling_rate, self._private, self.position)\n"
        "        counted = bool(self._step.done)\n",
        COUNTS + "test_a_step_that_counts_asks_the_same_clients_twice_and_sends_weights_once",
    ),
    mutant(
        "secure-sum-centred-before-the-noise",
        "A sum of secure aggregation is unwrapped before it has noise, so that a client can put it at the edge",
        "privacy/updates.py",
        "        return centred(release(local()))\n",
        "        return release(local())\n",
        LIARS + "test_a_sum_at_the_modulus_edge_is_centred_by_its_noise_and_not_before",
    ),
    mutant(
        "secure-digits-unwrapped-one-by-one",
        "Digits of secure aggregation are unwrapped each by itself, so that a client can make another's flip one",
        "federated/digits.py",
        "        total += (sums.to(torch.int64) % (MODULUS >> BITS * place)) << BITS * place\n",
        "        total += ((sums.to(torch.int64) + 2**31) % 2**32 - 2**31) << BITS * place\n",
        LIARS + "test_digits_that_wrap_move_the_sum_by_a_number_of_the_liars_own",
    ),
    mutant(
        "clients-weights-scale-the-secure-sum",
        "The sum of secure aggregation is divided by the weights that clients say they have, as Flower does",
        "federated/digits.py",
        "    del weights\n    return from_digits(sums.to(torch.int64) - clients * OFFSET)\n",
        "    total = from_digits(sums.to(torch.int64) - clients * OFFSET)\n"
        "    return (total * (2.0 * OFFSET * clients / weights)).round().to(torch.int64)\n",
        LIARS + "test_the_weights_that_clients_say_they_have_do_not_scale_the_sum",
    ),
]
