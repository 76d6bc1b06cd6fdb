"""Flower's SecAgg+ under a round: the server gets the integers' sum, and no single update.

Its workflow is for Flower's older strategies, takes weighted means of floats and rounds them at random. Weights of
one and integers in its range of quantization pass its clients unchanged; long integers go as digits. Of its four
stages at the server the first three are used; the last is `unmasking`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    Parameters,
    Status,
    ndarray_to_bytes,
    ndarrays_to_parameters,
)
from flwr.common.secure_aggregation.ndarrays_arithmetic import factor_combine
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.common.secure_aggregation.secaggplus_constants import Key as SecureKey
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.server import LegacyContext
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState
from flwr.serverapp import Grid
from torch import Tensor

from sparsedp.core.errors import SparseDPError
from sparsedp.federated.digits import OFFSET, digit_count, to_digits
from sparsedp.federated.task import Task, Wire
from sparsedp.flower.records import count_bytes, to_records
from sparsedp.flower.unmasking import unmasked_total
from sparsedp.privacy.updates import MODULUS

logger = logging.getLogger("sparsedp")

COVER, SECURE = "cover", "secure"
"""Names of values in a task: send zeros, for company; and answer by digits."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SecAggPlus:
    """Sum a round's updates by Flower's SecAgg+.

    **Privacy.** Flower makes its masks from seeds of 32 bits: they keep out an honest server, and no attacker who can
    try them all. Clients that were not picked join rounds with too few, and send zeros: to leave out such rounds
    would let the presence of one client decide about another's update. The clients of a round see who they are. One
    that lies can tell on who took part, spoil the model and stop the run, and takes no noise off another's update.

    Attributes:
        shares: into which share of the clients each key is split.
        threshold: the share of those that can put a key together; so many must stay to the end of a round.
        company: fewest clients in a round.
    """

    shares: float = 1.0
    threshold: float = 0.6
    company: int = 3

    def total(
        self, grid: Grid, tasks: Mapping[int, Task], others: Sequence[int], task: Task, timeout: float
    ) -> tuple[Tensor, set[int]]:
        """The sum of the updates of a round, modulo 2^51, and the nodes that are in it.

        Args:
            grid: Flower's.
            tasks: by node, of those that were picked.
            others: nodes that may be asked for company.
            task: the round's, for its public numbers.
            timeout: seconds to wait at each of the four stages.

        Raises:
            SparseDPError: too few clients stayed; nothing is learned of any update, and nothing released.
        """
        if not tasks:
            return torch.zeros(task.size, dtype=torch.int64), set()
        company = others[: max(0, self.company - len(tasks))]
        contents = {node: _content(asked, {SECURE: 1}) for node, asked in tasks.items()}
        contents |= {node: _content(_without_weights(task), {SECURE: 1, COVER: 1}) for node in company}
        summed = self._run(grid, contents, task, timeout)
        if summed is None:
            raise SparseDPError(
                f"secure aggregation halted: of {len(contents)} clients too few stayed to the end. Nothing was "
                "released; resume the run, or lower the threshold"
            )
        return summed

    def _run(
        self, grid: Grid, contents: Mapping[int, RecordDict], task: Task, timeout: float
    ) -> tuple[Tensor, set[int]] | None:
        workflow = SecAggPlusWorkflow(
            float(self.shares),
            float(self.threshold),
            max_weight=1.0,
            clipping_range=float(OFFSET),
            quantization_range=2 * OFFSET,
            modulus_range=MODULUS,
            timeout=timeout,
        )
        records = RecordDict(
            {
                MAIN_CONFIGS_RECORD: ConfigRecord({Key.CURRENT_ROUND: task.step + 1}),
                MAIN_PARAMS_RECORD: ArrayRecord(),
            }
        )
        context = LegacyContext(
            context=Context(0, 0, {}, records, {}), strategy=_TheseClients(list(contents))
        )
        state = WorkflowState()
        if not workflow.setup_stage(grid, context, state):
            return None
        state.nid_to_fitins = dict(contents)
        stages = (workflow.share_keys_stage, workflow.collect_masked_vectors_stage)
        if not all(stage(grid, context, state) for stage in stages):
            return None
        answered, shape = set(state.active_node_ids), (digit_count(task.grid), task.size)
        total = unmasked_total(grid, state, shape, str(task.step + 1), timeout)
        return None if total is None else (total, answered)


@final
class MaskedBytes:
    """How many bytes a task and a masked answer have. Keys and their shares come on top, for every other client."""

    def task(self, task: Task) -> int:
        """Of a task."""
        return count_bytes(_content(task, {SECURE: 1}))

    def answer(self, task: Task) -> int:
        """Of an update or count, as digits of eight bytes behind masks."""
        content = masked_answer(torch.zeros(task.size, dtype=torch.int64), task)
        for arrays in content.array_records.values():
            arrays.clear()
        digits = np.zeros((digit_count(task.grid), task.size), dtype=np.int64)
        masked = [ndarray_to_bytes(part) for part in factor_combine(0, [digits])]
        content[RECORD_KEY_CONFIGS] = ConfigRecord({SecureKey.MASKED_PARAMETERS: masked})
        return count_bytes(content)


def _content(task: Task, values: Mapping[str, int]) -> RecordDict:
    wire = task.to_wire()
    return to_records(Wire(wire.arrays, {**wire.values, **values}))


def masked_answer(update: Tensor, task: Task) -> RecordDict:
    """A client's update in the form that Flower's mod masks: digits, with weight one."""
    digits = to_digits(update, digit_count(task.grid)).to(torch.float64).numpy()
    return fitres_to_recorddict(
        FitRes(Status(Code.OK, "masked"), ndarrays_to_parameters([digits]), 1, {}), False
    )


def _without_weights(task: Task) -> Task:
    return replace(task, base=None, active=None, moved=None)


class _Proxy:
    """As much of Flower's old client proxy as its workflow looks at."""

    def __init__(self, node: int) -> None:
        self.node_id, self.cid = node, str(node)


class _TheseClients(FedAvg):
    """Flower's old strategy, as far as the workflow asks it: says who takes part."""

    def __init__(self, nodes: Sequence[int]) -> None:
        super().__init__()
        self._nodes = nodes

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: Any) -> list[Any]:
        return [(_Proxy(node), FitIns(Parameters([], ""), {})) for node in self._nodes]
