"""The strategy and the `ClientApp` with the real flwr package.

`make integrations` installs it and runs these; without it they are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

flwr = pytest.importorskip("flwr", reason="flwr is not installed; `make integrations` installs it")
sys.path.append(str(Path(__file__).parents[1] / "federated"))

from federated_tools import CLIENTS, LOSS, Loopback, a_plan, make_model, rows_of, sgd  # noqa: E402
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto  # noqa: E402
from flwr.serverapp import Grid  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

import sparsedp  # noqa: E402
from sparsedp.federated import Client, FederatedTrainer, LocalSGD, Payload  # noqa: E402
from sparsedp.integrations.flower import SparseDPStrategy, client_app, read_answer, to_records  # noqa: E402
from sparsedp.runs.run import Run  # noqa: E402

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("default")


class LocalGrid(Grid):
    """Hands each message to the `ClientApp` of its node; `drops` says which nodes do not answer in which round."""

    def __init__(
        self, app: ClientApp, nodes: int, drops: Callable[[int, str], bool] = lambda node, group: False
    ):
        self._app, self._drops = app, drops
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # as Flower does for a process
        self.contexts = {
            1000 + i: Context(1, 1000 + i, {"partition-id": i, "num-partitions": nodes}, RecordDict(), {})
            for i in range(nodes)
        }

    set_run = run = create_message = push_messages = pull_messages = None  # abstract, and never asked

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def send_and_receive(self, messages, *, timeout=None):
        return [reply for message in messages if (reply := self._handle(message)) is not None]

    def _handle(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        if self._drops(node, message.metadata.group_id):
            return None
        message.content = recorddict_from_proto(recorddict_to_proto(message.content))
        try:
            reply = self._app(message, self.contexts[node])
        except Exception as error:
            return Message(Error(code=0, reason=str(error)), reply_to=message)
        return reply


def make_client(context) -> Client:
    rows = rows_of(context.node_config["partition-id"])
    return Client(make_model, LocalSGD(dataset=rows, loss=LOSS))


def trained(plan, grid, on_round=None, **options):
    trainer = FederatedTrainer(make_model(), plan=plan, optimizer=sgd, **options)
    strategy = SparseDPStrategy(trainer, connect_timeout=1, on_round=on_round)
    flower = strategy.start(grid, timeout=5)
    return strategy.result, flower


def without_flower(plan):
    with FederatedTrainer(make_model(), plan=plan, optimizer=sgd, seed=5) as trainer:
        Loopback().run(trainer)
        return trainer.finish()


@pytest.mark.parametrize("method", ["dp-sgd", "tp-topk", "on-rand", "adadpigu"])
def test_a_run_over_flower_is_the_run_without_it(method, tmp_path):
    plan = a_plan(method)
    expected = without_flower(plan)
    grid = LocalGrid(client_app(make_client), CLIENTS)
    found, flower = trained(plan, grid, seed=5, run_dir=tmp_path / "run")
    assert all(map(torch.equal, expected.model.parameters(), found.model.parameters()))
    for name, weights in flower.arrays.to_torch_state_dict().items():
        assert torch.equal(weights, found.model.state_dict()[name])
    verified = sparsedp.verify(tmp_path / "run", independent=False)
    assert verified.passed, verified.reasons


def test_clients_that_drop_out_are_named_and_the_run_goes_on(caplog):
    def drops(node: int, group: str) -> bool:
        return node == 1003 and group == "2"

    grid = LocalGrid(client_app(make_client), CLIENTS, drops)
    missing = {}
    result, _ = trained(
        a_plan("dp-sgd", batch_size=CLIENTS),
        grid,
        on_round=lambda number, report: missing.update({number: report.missing}),
    )
    assert result.complete
    assert [number for number, clients in missing.items() if clients] == [2]
    assert missing[2] == (3,)
    assert "client" not in caplog.text


def test_bad_clients_are_named(caplog):
    def odd(context):
        if context.node_config["partition-id"] == 4:
            raise ValueError("the patient's name is Ada")
        return make_client(context)

    refused = []
    result, _ = trained(
        a_plan("dp-sgd", batch_size=CLIENTS),
        LocalGrid(client_app(odd), CLIENTS),
        on_round=lambda number, report: refused.extend(report.rejected),
    )
    assert result.complete
    assert {one.client for one in refused} == {4}
    assert "refused: its training failed (ValueError)" in refused[0].reason
    assert "Ada" not in caplog.text + str(refused)
    assert "client 4" not in caplog.text


def test_nothing_that_a_client_sends_stops_the_server():
    assert "cannot be read" in read_answer(RecordDict())
    assert "cannot be read" in read_answer(RecordDict({"sparsedp.values": ConfigRecord({"reason": "x"})}))
    long = read_answer(to_records(Payload({}, {"reason": "no\nclient 3, round 1: fine " * 100})))
    assert isinstance(long, str)
    assert "\n" not in long
    assert len(long) <= 300


def test_flowers_own_privacy_settings_are_refused():
    from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
    from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping

    for mod in (fixedclipping_mod, adaptiveclipping_mod, LocalDpMod(1.0, 1.0, 1.0, 1e-5)):
        with pytest.raises(sparsedp.PrivacyError, match="leave it out"):
            client_app(make_client, mods=[mod])
    trainer = FederatedTrainer(make_model(), plan=a_plan(), optimizer=sgd)
    wrapped = DifferentialPrivacyServerSideFixedClipping(SparseDPStrategy(trainer), 1.0, 1.0, CLIENTS)
    with pytest.raises(sparsedp.PrivacyError, match="must stay"):
        wrapped.start(LocalGrid(client_app(make_client), CLIENTS), flwr.app.ArrayRecord(), 1)
    trainer.close()


def test_too_few_clients_are_waited_for_and_then_refused():
    trainer = FederatedTrainer(make_model(), plan=a_plan(), optimizer=sgd)
    with pytest.raises(sparsedp.SparseDPError, match="got 3 clients"):
        SparseDPStrategy(trainer, connect_timeout=0.1).start(LocalGrid(client_app(make_client), 3))
    trainer.close()


@pytest.mark.timeout(600)
def test_the_example_runs_in_flowers_simulation_engine(tmp_path):
    """Minutes, as every client of every round is a process that imports torch."""
    pytest.importorskip("ray", reason="flwr[simulation] is not installed")
    out = tmp_path / "run"
    asked = {"clients": 3, "clients-a-round": 2, "rounds": 4, "out": str(out)}
    code = (
        "import flower_digits as app; from flwr.simulation import run_simulation; "
        f"app.DEFAULTS.update({asked!r}); run_simulation(app.server, app.client, num_supernodes=3)"
    )
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "examples" / "flower_digits"), *sys.path])
    ours = {
        "PYTHONPATH": path,
        "FLWR_HOME": str(tmp_path),
        "FLWR_TELEMETRY_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", code]
    subprocess.run(command, env={**os.environ, **ours}, check=True, capture_output=True, timeout=500)
    verified = sparsedp.verify(out, independent=False)
    assert verified.passed, verified.reasons
    record = Run.open(out).record
    assert (record["status"], record["unit"], record["units"]) == ("finished", "client", 3)
