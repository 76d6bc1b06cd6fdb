"""Record canaries: a row of the user's data, through the user's model and the engine, in and out of a release."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from sparsedp.auditing.canaries import noisy_sum, release
from sparsedp.auditing.estimators import Scores
from sparsedp.auditing.leave_one_out import batch_of, generators_of_a_step
from sparsedp.auditing.subject import Setting, Subject
from sparsedp.grad_sample.query import Query
from sparsedp.randomness import PublicRandomness, SystemRandomness

COMPANY = 7
"""Other units in the batch; the attacker knows them."""


def record_scores(subject: Subject, setting: Setting, releases: int, tick: Callable[[int], None]) -> Scores:
    """Release a small batch with and without one unit in turn; the attacker knows all the others.

    A score is the component of the release, less what the others add, along what the unit adds, over the clip norm.
    """
    engine, plan = subject.make_engine(), subject.plan
    query = Query(setting.support, setting.clip, setting.geometry, setting.per_sample_top)
    order = PublicRandomness.fresh().permutation(plan.units, (0,)).numpy()
    company, everyone = order[1 : 1 + COMPANY], order[: 1 + COMPANY]
    with generators_of_a_step(subject, 0):
        others = engine.clipped_sum(batch_of(subject, subject.dataset, company, 0), query)
    with generators_of_a_step(subject, 0):
        own = engine.clipped_sum(batch_of(subject, subject.dataset, everyone, 0), query) - others
    length = float(torch.linalg.vector_norm(own))
    if length == 0:
        return Scores(np.empty(0), np.empty(0))
    direction, known = (own / length).numpy(), (others / setting.clip.sensitivity).numpy()
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(releases):
        units = everyone if number % 2 else company
        with generators_of_a_step(subject, 0):
            batch = batch_of(subject, subject.dataset, units, 0)
            released = release(plan, setting, engine, batch, SystemRandomness())
        found[number % 2].append(float((noisy_sum(plan, setting, released) - known) @ direction))
        tick(1)
    return Scores(np.asarray(found[1]), np.asarray(found[0]))
