"""Splits, bundles, and how inputs are kept."""

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from sparsedp.errors import DataError
from sparsedp.loading import BatchFetch
from sparsedp_experiments.data import CENTRED, UNIT, DataBundle, Dense, PixelScale, Sparse, Split, holdout


def byte_split(rows=6, units=None):
    values = torch.arange(rows * 8, dtype=torch.uint8).reshape(rows, 2, 2, 2)
    return Split(Dense(values, UNIT), torch.arange(rows) % 2, units)


def sparse_rows():
    """[[0, 2, 0, 1], [0, 0, 0, 0], [3, 0, 0, 0], [0, 0, 4, 5]]."""
    return Sparse(
        torch.tensor([0, 2, 2, 3, 5]),
        torch.tensor([1, 3, 0, 2, 3], dtype=torch.int32),
        torch.arange(5) + 1.0,
        4,
    )


def test_bytes_become_floats_between_zero_and_one():
    split = byte_split()
    inputs, targets = split.rows_at(torch.tensor([5, 0]))
    assert inputs.dtype == torch.float32
    torch.testing.assert_close(inputs[1], torch.arange(8).reshape(2, 2, 2) / 255)
    assert targets.tolist() == [1, 0]


def test_pixel_scales_are_the_affine_maps_they_say():
    values = torch.tensor([[[[0]], [[255]]]], dtype=torch.uint8)
    index = torch.tensor([0])
    torch.testing.assert_close(Dense(values, CENTRED).batch(index).flatten(), torch.tensor([-1.0, 1.0]))
    scale = PixelScale.from_moments((0.5, 0.25), (0.1, 0.5))
    torch.testing.assert_close(Dense(values, scale).batch(index).flatten(), torch.tensor([-5.0, 1.5]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32])
def test_a_large_fetch_equals_fetching_one_by_one(dtype):
    values = torch.randint(0, 200, (40, 3), generator=torch.Generator().manual_seed(0)).to(dtype)
    features = Dense(values, PixelScale((1.0,), (0.0,)))
    indices = torch.randint(0, 40, (1500,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(features.batch(indices), values[indices].float())


def test_half_floats_become_floats_and_ids_stay_ids():
    assert Dense(torch.ones(2, 3, dtype=torch.float16)).batch(torch.tensor([1])).dtype == torch.float32
    assert Dense(torch.ones(2, 3, dtype=torch.int64)).batch(torch.tensor([1])).dtype == torch.int64


def test_a_selection_shares_its_values_and_can_be_selected_from():
    split = byte_split()
    chosen = split.select(torch.tensor([4, 1, 5]))
    assert torch.equal(chosen.inputs, split.inputs[[4, 1, 5]])
    assert torch.equal(chosen.select(torch.tensor([2, 0])).inputs, split.inputs[[5, 4]])
    assert chosen.features.values.data_ptr() == split.features.values.data_ptr()


def test_sparse_rows_are_fetched_dense_in_any_order():
    rows = sparse_rows()
    expected = torch.tensor([[0, 2, 0, 1], [0, 0, 0, 0], [3, 0, 0, 0], [0, 0, 4, 5.0]])
    expected[0] = torch.tensor([0, 1, 0, 2])
    order = torch.tensor([3, 1, 0, 0, 2])
    torch.testing.assert_close(rows.batch(order), expected[order])
    torch.testing.assert_close(rows.select(order).batch(torch.arange(5)), expected[order])
    assert rows.batch(torch.tensor([], dtype=torch.int64)).shape == (0, 4)


def test_a_split_is_a_data_set_for_the_sampler_and_the_data_loader():
    split = byte_split()
    assert isinstance(split, BatchFetch)
    batches = list(DataLoader(split, batch_size=4))
    torch.testing.assert_close(torch.cat([inputs for inputs, _ in batches]), split.inputs)
    one_input, one_target = split[-1]
    torch.testing.assert_close(one_input, split.inputs[5])
    assert one_target == 1
    with pytest.raises(IndexError):
        split[6]
    assert len(pickle.loads(pickle.dumps(split))) == 6


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.99])
def test_holdout_is_a_partition_that_depends_on_the_seed_alone(fraction):
    split = byte_split(rows=20)
    rest, held = holdout(split, fraction, seed=3)
    assert len(held) == min(max(round(20 * fraction), 1), 19)
    together = torch.cat([rest.inputs, held.inputs])
    assert torch.equal(torch.unique(together, dim=0), torch.unique(split.inputs, dim=0))
    assert torch.equal(held.inputs, holdout(split, fraction, seed=3)[1].inputs)
    others = [holdout(split, 0.3, seed=seed)[1].inputs for seed in range(5)]
    assert any(not torch.equal(others[0], other) for other in others[1:])


def test_holdout_never_splits_a_unit():
    units = torch.tensor([7, 7, 3, 3, 3, 9, 1, 1, 4, 4])
    rest, held = holdout(byte_split(rows=10, units=units), 0.4, seed=0)
    assert held.unit_count == 2
    assert not set(rest.units.tolist()) & set(held.units.tolist())
    assert len(rest) + len(held) == 10


def test_validated_bundle_never_shows_the_test_set():
    test = Split(
        Dense(torch.full((3, 2, 2, 2), 255, dtype=torch.uint8), UNIT), torch.zeros(3, dtype=torch.int64)
    )
    bundle = DataBundle("toy", "made", byte_split(20), test, ("a", "b"))
    tuning = bundle.validated(fraction=0.25, seed=1)
    assert (len(tuning.train), len(tuning.test)) == (15, 5)
    assert tuning.test.inputs.max() < 1
    assert "validation" in tuning.notes[-1]


def test_a_unit_on_both_sides_is_refused():
    train = byte_split(4, units=torch.tensor([1, 1, 2, 3]))
    test = byte_split(2, units=torch.tensor([3, 4]))
    with pytest.raises(DataError, match="1 patients are in both train and test"):
        DataBundle("toy", "made", train, test, ("a", "b"), unit="patient")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dense(torch.zeros(3)), r"expected \[records, ...\]"),
        (lambda: Dense(torch.zeros(3, 2, dtype=torch.uint8)), "bytes need a PixelScale"),
        (lambda: Dense(torch.zeros(3, 2, 1), PixelScale((1.0,) * 3, (0.0,) * 3)), "expected 1 or one each"),
        (
            lambda: Sparse(torch.tensor([0, 2]), torch.tensor([0]), torch.tensor([1.0]), 4),
            "starts ending there",
        ),
        (lambda: Sparse(torch.tensor([0, 1]), torch.tensor([4]), torch.tensor([1.0]), 4), "outside 0..3"),
        (lambda: Split(sparse_rows(), torch.zeros(3)), r"expected \(4,\)"),
        (lambda: Split(sparse_rows(), torch.zeros(4), torch.zeros(4)), "expected 4 integers"),
        (lambda: holdout(byte_split(), 1.0, 0), "between 0 and 1"),
        (lambda: holdout(byte_split(2, units=torch.tensor([5, 5])), 0.5, 0), "at least two"),
        (lambda: DataBundle("toy", "v", byte_split(), byte_split(), ("a",)), "outside the 1 classes"),
        (
            lambda: DataBundle("toy", "v", byte_split(), Split(sparse_rows(), torch.zeros(4)), ("a", "b")),
            "expected the same",
        ),
    ],
)
def test_wrong_values_are_refused_with_the_reason(make, message):
    with pytest.raises(DataError, match=message):
        make()


def test_notes_and_fingerprint_travel_with_the_bundle():
    bundle = DataBundle(
        "toy", "made", byte_split(), byte_split(), ("a", "b"), notes=("say so",), fingerprint="x"
    )
    assert bundle.validated().notes[0] == "say so"
    assert bundle.validated().fingerprint is None
    assert bundle.input_shape == (2, 2, 2)
    assert np.isclose(bundle.train.inputs.max(), 47 / 255)
