"""Training data: what users give as a data set, the batches of a plan, and features of a frozen network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from sparsedp._validate import refuse_missing_ids
from sparsedp.batch import Batch, per_sample_loss, to_device
from sparsedp.errors import DataError, ModelError, PrivacyError
from sparsedp.evaluation import (
    Evaluator,
    MetricFunctions,
    evaluation_mode,
    held_out,
    refuse_training_arrays,
    refuse_training_rows,
    threshold_of,
)
from sparsedp.grad_sample.isolation import made_up
from sparsedp.guarantee import exceeds_target
from sparsedp.loading import Collate, DataConfig, ShapeValidator, fetch_rows, first_row, rows_in_order
from sparsedp.methods.method import SELECT
from sparsedp.methods.plan_config import PlanConfig
from sparsedp.privacy.accounting import plan_epsilon
from sparsedp.privacy.plan import Plan
from sparsedp.privacy.queries import inputs_of
from sparsedp.randomness import SEED_BYTES, PrivateRandomness, PublicRandomness, fork_generators
from sparsedp.sampling import LogicalBatch, PoissonSampler, UnitPartition
from sparsedp.validation.data import validate_collate, validate_items

_SOME_ROWS = "For some of the rows give Subset(dataset, indices); processes that train together share them"


@dataclass(frozen=True, slots=True, eq=False)
class GivenData:
    """A map-style data set, and what a loader said besides; `arrays` are X and y as they came, before conversion."""

    dataset: Dataset[Any]
    arrays: tuple[Any, ...] = ()
    from_loader: bool = False
    batch_size: int | None = None
    collate: Callable[[list[Any]], Batch] | None = None


def given_data(given: object, name: str) -> GivenData:
    """The data set in what was given; refused if its rows cannot be drawn by number, or a loader picks among them."""
    if isinstance(given, DataLoader):
        inner = given_data(given.dataset, name)
        _refuse_picked_rows(given, name)
        collate = None if given.collate_fn is default_collate else given.collate_fn
        return GivenData(inner.dataset, inner.arrays, True, given.batch_size, collate)
    if isinstance(given, IterableDataset):
        raise DataError(
            f"{name}: got the IterableDataset {type(given).__name__}, expected rows that can be drawn by number: the "
            "guarantee counts on every row joining a batch with the planned chance. Give it __len__ and __getitem__, "
            "or list(it) if it fits in memory"
        )
    if isinstance(given, (tuple, list)) and len(given) == 2 and all(_is_array(part) for part in given):
        tensors = [_tensor(part) for part in given]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if not (shapes[0] and shapes[1]) or shapes[0][0] != shapes[1][0]:
            raise DataError(
                f"{name}: got arrays of shapes {shapes[0]} and {shapes[1]}, expected as many targets as rows"
            )
        return GivenData(TensorDataset(*tensors), tuple(given))
    arrays = _is_array(given) or (isinstance(given, tuple) and any(_is_array(part) for part in given))
    if arrays or not hasattr(given, "__len__") or not hasattr(given, "__getitem__"):
        raise DataError(
            f"{name}: got {type(given).__name__}, expected two arrays, (X, y), a DataLoader, or a map-style data set "
            "(with __len__ and __getitem__); for more arrays give TensorDataset(*arrays) and a "
            "PerExampleLoss(lambda model, batch: ...)"
        )
    return GivenData(given, given.tensors if isinstance(given, TensorDataset) else ())  # type: ignore[arg-type]


def evaluator_of(
    held_apart: object,
    train: GivenData,
    criterion: Any,
    *,
    name: str = "eval_dataset",
    collate: Collate | None = None,
    metrics: MetricFunctions | None = None,
) -> Evaluator:
    """The loss and its metrics on held-out data in any form, none of which is training data; see `held_out`."""
    apart, loss = given_data(held_apart, name), per_sample_loss(criterion)
    refuse_training_arrays(train.arrays, apart.arrays)
    refuse_training_rows(train.dataset, apart.dataset)
    collate = apart.collate or collate or (None if apart.from_loader else train.collate)
    return held_out(
        apart.dataset, loss, collate_fn=collate, threshold=threshold_of(criterion), metrics=metrics
    )


def _refuse_picked_rows(loader: DataLoader[Any], name: str) -> None:
    """Refuse a loader whose sampler leaves rows out, or takes some more often: here it has no say."""
    if loader.batch_size is None:
        raise DataError(
            f"{name}: got no batch_size, or a batch_sampler, expected a number: all rows are taken, in batches of "
            f"that size; in training it is the expected one. {_SOME_ROWS}"
        )
    sampler: Any = loader.sampler
    plain = type(sampler) in (RandomSampler, SequentialSampler)
    if not plain or len(sampler.data_source) != len(cast("Any", loader.dataset)):
        raise DataError(
            f"{name}: got the sampler {type(sampler).__name__}, expected a plain one (shuffle=True or False) over "
            "all rows: every row is drawn with the same chance, which the guarantee is computed from, and every "
            f"held-out one is evaluated. {_SOME_ROWS}"
        )


def given_units(units: Any) -> Any:
    """The id of each row's unit, as given; refused if ids are missing, or of types that cannot be compared."""
    if units is None or (isinstance(units, Tensor) and not units.is_floating_point()):
        return units
    ids = np.asarray(units)
    refuse_missing_ids(ids, "unit_ids")
    try:
        np.unique(ids)
    except TypeError as error:
        raise DataError(f"unit_ids: ids of mixed types cannot be compared ({error}); use one type") from error
    return units


def loading_of(data: DataConfig, given: GivenData, unit_ids: Any) -> DataConfig:
    """How rows are loaded: as told, with the ids and the collate_fn that came by other ways."""
    if unit_ids is not None and data.unit_ids is not None:
        raise DataError("unit_ids: got ids here and in data, expected one of them; drop data.unit_ids")
    ids = given_units(data.unit_ids if unit_ids is None else unit_ids)
    return replace(data, unit_ids=ids, collate_fn=data.collate_fn or given.collate)


def _is_array(value: object) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) or hasattr(value, "to_numpy")


def _tensor(value: Any) -> Tensor:
    """Single precision where it was double, as models are; whole numbers as int64, as losses take them, but bytes."""
    array = value.to_numpy() if hasattr(value, "to_numpy") else value
    if isinstance(array, np.ndarray):
        if array.dtype.kind not in "fiub":
            raise DataError(f"got an array of {array.dtype}, expected numbers; encode names as numbers first")
        array = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    tensor: Tensor = array
    if tensor.dtype in (torch.int8, torch.int16, torch.int32):
        return tensor.long()
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def count_units(dataset: Dataset[Any], units: Tensor | Sequence[int] | None) -> int:
    """How many units a data set has: rows, or the different ids among `units`, one for each row."""
    rows = len(cast("Any", dataset))
    if rows == 0:
        raise DataError("the dataset is empty; give at least one row")
    if units is None:
        return rows
    if len(units) != rows:
        raise DataError(f"unit_ids: got {len(units)} ids for {rows} rows, expected one for each")
    return len(np.unique(np.asarray(units)))


def check_plan(plan: Plan, units: int, *, rows_are_units: bool) -> None:
    """Refuse a plan that is not for this data, is not what it was made from, or promises more than it keeps."""
    PlanConfig.of(plan).check(plan)
    plan.check_calibrated()
    if plan.units != units:
        raise DataError(
            f"the plan is for {plan.units} units ({plan.unit}) and the data set has {units}; the sampling rate would "
            "not be the planned one. Make a plan for this data, or give the units it counts"
        )
    if rows_are_units and plan.unit != "row":
        raise PrivacyError(
            f"the plan promises to protect each {plan.unit}, which takes the {plan.unit} of every row: give "
            "DataConfig(unit_ids=...), or make a plan for rows"
        )
    if plan.target_epsilon is not None and exceeds_target(plan, cost := plan_epsilon(plan)):
        raise PrivacyError(
            f"the plan costs epsilon {cost:.6g} by {plan.accountant} and its target is {plan.target_epsilon:g}: it "
            "was changed after it was calibrated. Calibrate it again"
        )


@final
class Batches:
    """Draws every step's batch as the plan says.

    Formal guarantees: The rate comes from the plan that the ledger is charged by, and N is checked against it. Rows
    that look different beside different examples are refused: the first ones here, by their shapes in every batch.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        plan: Plan,
        randomness: PrivateRandomness,
        loading: DataConfig,
        partition: UnitPartition = UnitPartition(),  # noqa: B008
    ) -> None:
        self._dataset, self._plan, self._collate = dataset, plan, loading.collate_fn
        shapes = ShapeValidator()
        # A phase that does not train takes all units, so then there is a limit anyway.
        most = loading.max_physical_batch or max(1024, loading.rows_per_unit)
        self._samplers = {
            phase.name: PoissonSampler(
                dataset,
                sampling_rate=phase.sampling_rate,
                randomness=randomness,
                loading=loading if phase.trains else replace(loading, max_physical_batch=most),
                shapes=shapes,
                partition=partition,
                whole_units=phase.name == SELECT.name,
            )
            for phase in plan.phases
        }
        units = next(iter(self._samplers.values())).unit_count
        check_plan(plan, units, rows_are_units=loading.unit_ids is None)
        validate_items(dataset, loading.unit_ids)
        validate_collate(dataset, loading.collate_fn, shapes)

    def probe_rows(self, count: int, public: PublicRandomness) -> Batch:
        """Rows from all over the data set, in the order of a public draw; they themselves are private."""
        everywhere = public.permutation(len(cast("Any", self._dataset)), key=(0, 0, 7)).numpy()
        with fork_generators(PublicRandomness(0).generator_seed(()), torch.device("cpu")):
            return fetch_rows(self._dataset, everywhere[:count], self._collate)

    def starting_at(self, step: int) -> Iterator[LogicalBatch]:
        """The batches of this step and all after it, phase by phase."""
        for phase in self._plan.phases:
            first = self._plan.first_step(phase.name)
            if step < first + phase.steps:
                yield from self._samplers[phase.name].batches(max(step, first), first + phase.steps)


def count_channels(dataset: Dataset[Any], collate: Collate | None) -> int:
    """How many channels the inputs have: a shape, which is public."""
    return int(inputs_of(first_row(dataset, collate)).shape[1])


def extract_features(
    body: nn.Module, dataset: Dataset[Any], *, batch_size: int = 256, collate_fn: Collate | None = None
) -> TensorDataset:
    """What a frozen network makes of every input, with the targets: a data set in memory to train a head on.

    >>> features = extract_features(body, dataset)  # doctest: +SKIP
    >>> result = fit(head, features, nn.CrossEntropyLoss(reduction="none"), epsilon=3)  # doctest: +SKIP

    Args:
        body: runs in evaluation mode without gradients, on the device of its parameters.
        dataset: of (input, target) tensors; the order stays, so `unit_ids` of the rows stay as they are.
        batch_size: how many rows run at once.
        collate_fn: makes a batch of items, as in a `DataLoader`.

    Formal guarantees: Features are private rows in another form. Training on them costs what training on the rows
    costs, as each is computed from its own row by a public function: that is checked on made-up rows, together and
    one by one.
    Edge cases: A data set that augments is read once, so every epoch sees the same features.

    Raises:
        DataError: the data set has no rows, or gives something else than (input, target) tensors.
        ModelError: the body mixes rows, draws random numbers, or remembers earlier rows.
        PrivacyError: `collate_fn` mixes rows.
    """
    rows = count_units(dataset, None)
    validate_collate(dataset, collate_fn, ShapeValidator())
    tensors: list[Any] = list(rows_in_order(dataset, rows, batch_size, collate_fn))
    for part in tensors:
        if not isinstance(part, (tuple, list)) or [isinstance(x, Tensor) for x in part] != [True, True]:
            raise DataError(
                f"extract_features: got a batch of type {type(part).__name__}, expected (input, target), both "
                "tensors; choose them in the data set or by collate_fn"
            )
    with evaluation_mode(body):
        _check_rows_are_computed_alone(body, tensors[0][0])
        features = torch.cat([_run(body, inputs) for inputs, _ in tensors])
    return TensorDataset(features, torch.cat([targets for _, targets in tensors]))


def _run(body: nn.Module, inputs: Tensor) -> Tensor:
    device = next((tensor.device for tensor in body.parameters()), torch.device("cpu"))
    with fork_generators(bytes(SEED_BYTES), device):
        found = body(to_device(inputs, device))
    if not isinstance(found, Tensor) or found.shape[:1] != inputs.shape[:1]:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ModelError(
            f"extract_features: the body gave {got} for {len(inputs)} rows, expected a tensor with one entry a row"
        )
    return found.cpu()


def _check_rows_are_computed_alone(body: nn.Module, like: Tensor) -> None:
    made = made_up(like, 8)
    together = _run(body, made)
    alone = torch.cat([_run(body, row[None]) for row in made])
    # Rounding in another batch changes this share of the largest feature; mixing changes far more.
    room = 1e-4 * float(together.abs().max()) if together.numel() else 0.0
    for other in (alone, _run(body, made.flip(0)).flip(0)):
        if not torch.allclose(together, other, rtol=0.0, atol=room, equal_nan=True):
            raise ModelError(
                "extract_features: the body makes something else of a row when other rows are in the batch or came "
                "before, so it mixes rows, draws random numbers or remembers; expected a fixed function of each row"
            )
