"""Secure aggregation with clients that lie: whatever one adds to the sum, the noise stays on what the others sent."""

from __future__ import annotations

import pytest
import torch
from federated_tools import a_plan, make_model, sgd

from sparsedp.core.clip import FlatClip
from sparsedp.core.errors import PrivacyError
from sparsedp.federated import FederatedTrainer
from sparsedp.federated.digits import BITS, OFFSET, digit_count, to_digits, total_of
from sparsedp.privacy.grid import Grid
from sparsedp.privacy.updates import MODULUS, AggregatedUpdates, Modular, centred, check_room

WEIGHT = 2 * OFFSET
EDGE = MODULUS // 2


def released(total: int, **changes) -> torch.Tensor:
    """The noisy mean of a first round, in steps of the grid over the batch size; the noise is that of the seed."""
    plan = a_plan("dp-sgd", **changes)
    with FederatedTrainer(make_model(), plan=plan, optimizer=sgd, seed=5) as trainer:
        begun = trainer.begin()
        grid, size = begun.task.grid, begun.task.size
        done = trainer.complete_aggregated(begun, torch.full((size,), total), [])
        return done.report.released.mean * plan.expected_batch_size(plan.phases[0]) / grid.step


def masked_sums(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """What clients' digits add up to, with an offset each, modulo the protocol's modulus."""
    return sum(to_digits(row, count) + OFFSET for row in numbers) % MODULUS


def test_a_sum_at_the_modulus_edge_is_centred_by_its_noise_and_not_before():
    """A liar puts the sum one step below the edge; another client's single step takes it over, and tells nothing."""
    without, with_it = released(EDGE - 1), released(EDGE)
    assert torch.equal(without.sign(), with_it.sign())
    assert 0 < int((without > 0).sum()) < without.numel()
    assert float(without.abs().max()) <= EDGE


def test_what_a_liar_adds_moves_the_release_by_that_and_by_nothing_else():
    honest, added = released(1000), 2**49 + 12345
    moved = released(centred(torch.tensor(1000 + added)).item())
    assert torch.allclose(moved - honest, torch.full_like(honest, added), rtol=0, atol=2)


@pytest.mark.parametrize("noise", [0.3, 1.0, 7.7])
def test_every_residue_reaches_the_noise_as_it_is(noise):
    grid = Grid.of(0.7, noise, 1000)
    ends = torch.arange(500)
    total = torch.cat([-EDGE + ends, EDGE - 1 - ends, ends * 2251799813])
    query = AggregatedUpdates(total, FlatClip(0.7), grid)
    assert torch.equal(grid.add_up(query.parts(grid.bound)), centred(total))


@pytest.mark.parametrize("weight", [1, -3 * WEIGHT, 0, MODULUS - 1])
def test_the_weights_that_clients_say_they_have_do_not_scale_the_sum(weight):
    numbers = torch.tensor([[5, -(2**30)], [70000, 9], [-1, 2**30]])
    found = total_of(torch.tensor([weight]), masked_sums(numbers, 2), len(numbers))
    assert torch.equal(found, numbers.sum(dim=0))


@pytest.mark.parametrize("edge", [2**31, 2**32, EDGE, MODULUS])
@pytest.mark.parametrize("place", [0, 1])
def test_digits_that_wrap_move_the_sum_by_a_number_of_the_liars_own(place, edge):
    """Without the victim's update a digit's sum lies just below the edge, with it beyond."""
    others, victim = torch.tensor([[3], [-9]]), torch.tensor([[70001]])
    lie = torch.zeros(2, 1, dtype=torch.int64)
    lie[place] = shift = edge - 1 - int(to_digits(others, 2)[place].sum())

    def seen(numbers: torch.Tensor) -> torch.Tensor:
        return total_of(torch.tensor([WEIGHT]), (masked_sums(numbers, 2) + lie) % MODULUS, len(numbers))

    absent = seen(torch.cat([others, torch.zeros_like(victim)]))
    present = seen(torch.cat([others, victim]))
    assert centred(present - absent).tolist() == [70001]
    assert int(absent - others.sum()) % MODULUS == (shift << BITS * place) % MODULUS


def test_more_clients_than_the_modulus_holds_are_refused():
    grid = Grid.of(1.0, 1.0, 10**6)
    most = int((EDGE - (10 << grid.noise_bits)) * grid.step / grid.bound)
    check_room(most, grid)
    assert digit_count(grid) * BITS < 64
    with pytest.raises(PrivacyError, match=f"got {most + 1} clients, expected at most {most}"):
        check_room(most + 1, grid)
    with pytest.raises(PrivacyError, match="expected at most 0"):
        check_room(1, Grid.of(1.0, 2e3, 10**9))


def test_sums_without_a_grid_are_refused():
    with pytest.raises(PrivacyError, match="adds integers"):
        Modular().floats(lambda: iter(()), lambda total: total, 3)
