"""The last stage of Flower's SecAgg+: masks are taken off a sum, and nothing else is done to it.

Flower's own divides by the sum of the weights that clients say they have, and makes floats of residues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common import NDArrays
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.ndarrays_arithmetic import (
    get_parameters_shape,
    parameters_addition,
    parameters_mod,
    parameters_subtraction,
)
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState
from flwr.serverapp import Grid
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key
from torch import Tensor

from sparsedp.core.errors import SparseDPError
from sparsedp.federated.digits import total_of


def unmasked_total(
    grid: Grid, state: WorkflowState, shape: tuple[int, int], group: str, timeout: float
) -> Tensor | None:
    """The sum of the clients' numbers, modulo 2^51; None if too few are left to take off the masks.

    Args:
        grid: Flower's.
        state: the protocol's, once the masked vectors are there.
        shape: of a client's digits.
        group: Flower's name for the round.
        timeout: seconds to wait for the shares.

    Raises:
        SparseDPError: a client sent something else than digits; nothing is learned of any update.
    """
    masked, there = state.aggregate_ndarrays, set(state.active_node_ids)
    if [(part.shape, part.dtype.name) for part in masked] != [((1,), "int64"), (shape, "int64")]:
        raise SparseDPError(
            "secure aggregation: the sum of the masked vectors has another shape or type than was asked for, so a "
            "client sent another. Nothing was released; use one version of sparsedp everywhere, and resume the run"
        )
    replies = grid.send_and_receive([_question(state, node, there, group) for node in there], timeout=timeout)
    shares = _shares(replies, state.sampled_node_ids)
    if any(len(mine) < state.threshold for mine in shares.values()):
        return None
    weights, sums = parameters_mod(_without_masks(masked, state, there, shares), state.mod_range)
    return total_of(torch.from_numpy(weights), torch.from_numpy(sums), len(there))


def _question(state: WorkflowState, node: int, there: set[int], group: str) -> Message:
    """Ask for shares of the seeds of those who are there, and of the keys of those who left."""
    around = state.nid_to_neighbours[node]
    asked = ConfigRecord(
        {
            Key.STAGE: Stage.UNMASK,
            Key.ACTIVE_NODE_ID_LIST: sorted(around & there),
            Key.DEAD_NODE_ID_LIST: sorted((around & state.sampled_node_ids) - there),
        }
    )
    return Message(RecordDict({RECORD_KEY_CONFIGS: asked}), node, MessageType.TRAIN, group_id=group)


def _shares(replies: Iterable[Message], nodes: set[int]) -> dict[int, list[bytes]]:
    """By node, what the others hold of its secret."""
    shares: dict[int, list[bytes]] = {node: [] for node in nodes}
    for reply in replies:
        if reply.has_error():
            continue
        told = reply.content.config_records[RECORD_KEY_CONFIGS]
        for node, share in zip(told[Key.NODE_ID_LIST], told[Key.SHARE_LIST], strict=True):
            if node in shares:
                shares[node].append(share)
    return shares


def _without_masks(
    masked: NDArrays, state: WorkflowState, there: set[int], shares: Mapping[int, list[bytes]]
) -> NDArrays:
    """Less the own masks of those who are there, and the pairwise ones that those who left have not cancelled."""
    shapes = get_parameters_shape(masked)
    for node, mine in shares.items():
        secret = combine_shares(mine)
        if node in there:
            masked = parameters_subtraction(masked, pseudo_rand_gen(secret, state.mod_range, shapes))
            continue
        for other in state.nid_to_neighbours[node] - {node}:
            theirs = bytes_to_public_key(state.nid_to_publickeys[other][0])
            key = generate_shared_key(bytes_to_private_key(secret), theirs)
            apply = parameters_addition if node > other else parameters_subtraction
            masked = apply(masked, pseudo_rand_gen(key, state.mod_range, shapes))
    return masked
