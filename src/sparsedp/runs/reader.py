"""A run on disk, read file by file as it is asked for: the one reader."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from sparsedp.errors import DataError, PrivacyError
from sparsedp.methods.support_scheduler import WARMUP
from sparsedp.methods.warmup import WarmupSeen
from sparsedp.parameters import Layout, Support
from sparsedp.privacy.ledger import FileLedger, VerifiedLedger
from sparsedp.privacy.plan import Plan
from sparsedp.runs.checkpoint import (
    Checkpoint,
    load_model_state,
    parse_checkpoint,
    read_checkpoint,
    read_layout,
)
from sparsedp.runs.documents import digest_of, parse_metrics, parse_plan, parse_record
from sparsedp.runs.folder import PLAN, RunFolder
from sparsedp.runs.history import EpochReport, SupportSpan
from sparsedp.runs.record import Record


@final
class Run:
    """What a run's folder holds. Each file is read when it is first asked for, and a damaged one is a `DataError`.

    Attributes:
        folder: where its files are.
    """

    def __init__(self, folder: RunFolder) -> None:
        """Use `open`."""
        self.folder = folder

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """The run in a folder.

        Raises:
            DataError: there is no run.
        """
        folder = RunFolder(Path(path))
        if not folder.exists:
            raise DataError(f"{folder.path} holds no run (no {PLAN}); to start one there, drop resume")
        return cls(folder)

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.folder.path

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @cached_property
    def plan(self) -> Plan:
        """What was planned."""
        return parse_plan(_read(self.folder.plan_file), self.folder.plan_file)

    @cached_property
    def record(self) -> Record:
        """What the run was and how it ended."""
        return parse_record(_read(self.folder.record_file), self.folder.record_file)

    @cached_property
    def epochs(self) -> tuple[EpochReport, ...]:
        """One report per epoch so far."""
        return parse_metrics(_read(self.folder.metrics_file), self.folder.metrics_file)

    @cached_property
    def ledger(self) -> VerifiedLedger:
        """What was spent, its chain verified.

        Raises:
            PrivacyError: it does not verify.
        """
        return FileLedger.read(self.folder.ledger_file)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The newest state."""
        return parse_checkpoint(_read(self.folder.checkpoint_file), self.folder.checkpoint_file)

    @cached_property
    def layout(self) -> Layout:
        """Names and shapes of the trainable parameters."""
        return read_layout(self.checkpoint.identity["layout"])

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Parameters and buffers at the checkpoint; without an average."""
        found: Mapping[str, Tensor] = self.checkpoint.state["model"]
        return found

    @cached_property
    def support(self) -> Support:
        """The last step's; all coordinates before the first."""
        return Support(self.checkpoint.state["journal"]["support"], self.layout.dimension)

    @cached_property
    def active(self) -> Support:
        """The one the next step would start from: the method's own."""
        controller = self.checkpoint.state["controller"]
        return Support(controller["tensors"]["support"], int(controller["values"]["dimension"]))

    @cached_property
    def spans(self) -> tuple[SupportSpan, ...]:
        """Its supports, in order."""
        return tuple(SupportSpan.from_json(span) for span in self.checkpoint.state["journal"]["spans"])

    @property
    def scores(self) -> Tensor | None:
        """What the last ranking was made from; None for dense and random methods."""
        found: Tensor | None = self.checkpoint.state["controller"]["tensors"].get("scores")
        return found

    @cached_property
    def warmup(self) -> WarmupSeen | None:
        """What its warm-up showed; None while it is not over, and for a run that could keep nothing."""
        return WarmupSeen.of(self._watched)

    @property
    def warming_up(self) -> bool:
        """Whether there is more to see of the warm-up."""
        return "over" in self._watched and not bool(self._watched["over"])

    @property
    def _watched(self) -> Mapping[str, Tensor]:
        tensors = self.checkpoint.state["controller"]["tensors"]
        return {name.removeprefix(WARMUP): one for name, one in tensors.items() if name.startswith(WARMUP)}

    @property
    def method(self) -> Mapping[str, Any]:
        """The row of the methods table, as the run's controller describes it."""
        described: Mapping[str, Any] = self.checkpoint.state["controller"]["values"]["method"]
        return described

    def check_ledger(self) -> None:
        """Check that the ledger is this plan's, and goes on from where checkpoint and record know it.

        Raises:
            PrivacyError: it does not.
        """
        if self.ledger.plan != self.plan.fingerprint:
            raise PrivacyError(
                f"the ledger belongs to another plan than {PLAN}; files of two runs were mixed"
            )
        for place in (self.checkpoint.state["ledger"], self.record["ledger"]):
            if place is not None:
                self.ledger.expect(place["head"], place["length"])


def load_weights(path: Path | str, model: nn.Module) -> None:
    """Load a run's trained weights into a model of the same architecture.

    Args:
        path: the run's folder, or its checkpoint file.
        model: gets the weights; the averaged ones if the run kept an average.

    Raises:
        DataError: there is no checkpoint, or it is damaged.
        ModelError: the checkpoint belongs to another architecture.
    """
    path = Path(path)
    checkpoint = read_checkpoint(RunFolder(path).checkpoint_file if path.is_dir() else path)
    load_model_state(model, checkpoint)
    average = checkpoint.state.get("average")
    if average is not None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in average["weights"]:
                    parameter.copy_(average["weights"][name])


def check_file(ledger: VerifiedLedger, file: Path) -> None:
    """Check that a file is the one the ledger's chain knows.

    Raises:
        PrivacyError: it is another one.
    """
    known = ledger.known(file.name)
    if file.exists() and digest_of(file.name, file.read_bytes()) not in known:
        raise PrivacyError(
            f"{file.name} is not the one the ledger knows: it was changed after the run wrote it, or lines were "
            "removed from the ledger; restore them"
        )


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{file} is missing; is {file.parent} the folder of a run?") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error})") from error
