"""Flower's real SecAgg+ with one client that does not follow the protocol: the others keep their noise.

`make integrations` installs flwr and runs these; without it they are skipped.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

pytest.importorskip("flwr", reason="flwr is not installed; `make integrations` installs it")
sys.path.append(str(Path(__file__).parents[1] / "federated"))

from federated_tools import LOSS, make_model, rows_of, sgd
from flower_grid import LocalGrid
from flwr.client.mod import secaggplus_mod
from flwr.common import bytes_to_ndarray, ndarray_to_bytes
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key

import sparsedp
from sparsedp.federated import Client, FederatedTrainer, LocalSGD
from sparsedp.federated.digits import OFFSET
from sparsedp.flower import SecAggPlus, SparseDPStrategy, client_app
from sparsedp.privacy.updates import MODULUS

pytestmark = pytest.mark.filterwarnings("default")

CLIENTS, VICTIM, LIAR = 4, 1, 3


class OneLies(LocalGrid):
    """The node of one client has an app of its own."""

    def __init__(self, app, lying, nodes):
        super().__init__(app, nodes)
        self._honest, self._lying = app, lying

    def _handle(self, message):
        self._app = self._lying if message.metadata.dst_node_id == 1000 + LIAR else self._honest
        return super()._handle(message)


def says_another_weight(message, context, call_next):
    reply = call_next(message, context)
    for record in reply.content.metric_records.values():
        if "num_examples" in record:
            record["num_examples"] = -(CLIENTS - 2)
    return reply


def shifts(changed):
    """Changes what Flower's mod has masked: weight and digits."""

    def mod(message, context, call_next):
        reply = call_next(message, context)
        sent = reply.content.config_records.get(RECORD_KEY_CONFIGS, {})
        if Key.MASKED_PARAMETERS in sent:
            weight, digits = (bytes_to_ndarray(part) for part in sent[Key.MASKED_PARAMETERS])
            sent[Key.MASKED_PARAMETERS] = [ndarray_to_bytes(part) for part in changed(weight, digits)]
        return reply

    return mod


def makes_the_weights_one(weight, digits):
    return (weight + 1 - CLIENTS * 2 * OFFSET) % MODULUS, digits


def to_the_edge_of_32_bits(weight, digits):
    return weight, (digits + 2**32 - CLIENTS * OFFSET) % MODULUS


def to_the_edge_of_the_modulus(weight, digits):
    return weight, (digits + np.array([[MODULUS // 2], [0]])) % MODULUS


def released(victims_rows: bool, *mods) -> tuple[torch.Tensor, float]:
    """The first round's release, in clip norms, and the modulus; the victim has data or none, the others none."""

    def make_client(context):
        inputs, labels = rows_of(VICTIM).tensors
        count = len(labels) if victims_rows and context.node_config["partition-id"] == VICTIM else 0
        return Client(
            make_model, LocalSGD(dataset=TensorDataset(50 * inputs[:count], labels[:count]), loss=LOSS)
        )

    plan = sparsedp.build_plan(
        "dp-sgd", units=CLIENTS, unit="client", batch_size=CLIENTS, epochs=1, epsilon=10, delta=1e-3,
        clip_norm=0.1, accountant="rdp",
    )  # fmt: skip
    reports = []
    trainer = FederatedTrainer(make_model(), plan=plan, optimizer=sgd, seed=5, callbacks=[reports.append])
    honest = client_app(make_client, mods=[secaggplus_mod])
    grid = OneLies(honest, client_app(make_client, mods=[*mods]), CLIENTS)
    SparseDPStrategy(trainer, patience=1, secure=SecAggPlus()).start(grid, timeout=5)
    first = next(one for one in reports if isinstance(one, sparsedp.StepReport)).released
    phase = plan.phases[0]
    task_grid = sparsedp.privacy.grid.Grid.of(phase.clip_norm, phase.noise_multiplier, len(first.mean))
    scale = plan.expected_batch_size(phase) / phase.clip_norm
    return first.mean * scale, MODULUS * task_grid.step / phase.clip_norm


LIES = {
    "none": (secaggplus_mod,),
    "another weight": (secaggplus_mod, says_another_weight),
    "weights of one in all": (shifts(makes_the_weights_one), secaggplus_mod),
    "digits at the edge of 32 bits": (shifts(to_the_edge_of_32_bits), secaggplus_mod),
    "digits at the edge of the modulus": (shifts(to_the_edge_of_the_modulus), secaggplus_mod),
}


@pytest.mark.parametrize("lie", LIES)
def test_one_client_that_lies_does_not_scale_what_another_adds(lie):
    (present, modulus), (absent, _) = released(True, *LIES[lie]), released(False, *LIES[lie])
    moved = present - absent
    assert float((moved - modulus * (moved / modulus).round()).norm()) == pytest.approx(1, abs=0.01)


def test_at_the_edge_of_the_modulus_the_noise_decides_what_wraps():
    absent, modulus = released(False, *LIES["digits at the edge of the modulus"])
    assert 0 < int((absent > 0).sum()) < absent.numel()
    assert float(absent.abs().min()) > modulus / 4


def test_another_shape_than_asked_for_stops_the_run_and_releases_nothing():
    twice = shifts(lambda weight, digits: (weight, np.stack([digits, digits])))
    with pytest.raises(sparsedp.SparseDPError, match="a client sent another"):
        released(True, twice, secaggplus_mod)
