"""`Release`: built by the mechanism alone, read-only, and nothing private in it."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from sparsedp.batch import MicroBatch
from sparsedp.clipping import FlatClip
from sparsedp.errors import PrivacyError
from sparsedp.grad_sample import BookkeepingEngine, Query
from sparsedp.parameters import Support
from sparsedp.privacy.ledger import Charge, MemoryLedger
from sparsedp.privacy.mechanism import GaussianMechanism, Release
from sparsedp.privacy.queries import GradientSum
from sparsedp.randomness import SeededRandomness

FIELDS = {"support", "mean", "noise_scale", "phase", "step", "for_release", "private"}


def a_release() -> Release:
    return GaussianMechanism(MemoryLedger(), SeededRandomness(0)).release(
        GradientSum(
            BookkeepingEngine(nn.Linear(3, 2), lambda model, rows: model(rows).sum(1)),
            [MicroBatch(torch.ones(4, 3))],
            Query(Support([0, 5, 7], 8), FlatClip(1.0)),
        ),
        Charge("train", 0, 0.1, 1.0),
        expected_batch_size=4.0,
    )


@pytest.mark.parametrize("seal", [None, object(), True, "seal"])
def test_it_cannot_be_built_without_the_seal(seal):
    with pytest.raises(PrivacyError, match=r"GaussianMechanism\.release"):
        Release(
            support=Support([0], 1),
            mean=torch.ones(1),
            noise_scale=torch.ones(1),
            phase="train",
            step=0,
            for_release=True,
            private=True,
            seal=seal,
        )


def test_the_seal_has_no_default():
    assert inspect.signature(Release.__init__).parameters["seal"].default is inspect.Parameter.empty


@pytest.mark.parametrize("name", [*sorted(FIELDS), "_mean", "_noise_scale", "note"])
def test_it_is_read_only(name):
    released = a_release()
    with pytest.raises(PrivacyError, match="read-only"):
        setattr(released, name, torch.zeros(3))


@pytest.mark.parametrize("name", ["mean", "noise_scale"])
def test_changing_what_it_gives_does_not_change_it(name):
    released = a_release()
    before = getattr(released, name).clone()
    getattr(released, name).zero_()
    released.dense().zero_()
    assert torch.equal(getattr(released, name), before)
    assert bool((before != 0).all())


def test_the_dense_form_is_the_mean_on_the_support_and_zero_elsewhere():
    released = a_release()
    dense = released.dense()
    assert torch.equal(released.support.gather(dense), released.mean)
    assert bool((dense[~released.support.mask()] == 0).all())


def test_it_holds_what_is_public_and_nothing_else():
    held = {name.lstrip("_") for name in Release.__slots__}
    assert held == FIELDS
    assert not hasattr(a_release(), "__dict__")


def test_its_values_do_not_hang_on_a_graph():
    released = a_release()
    assert not released.mean.requires_grad
    assert not released.noise_scale.requires_grad


def test_its_text_shows_no_numbers_of_the_gradient():
    assert repr(a_release()) == "Release(step=0, phase='train', support=Support(k=3, d=8))"


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
def test_it_cannot_be_copied_past_the_seal(duplicate):
    with pytest.raises(PrivacyError, match="read-only"):
        duplicate(a_release())
