"""The spine: one private step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from sparsedp.core.batch import MicroBatch, PerSampleLoss, Rows, check_losses, row_count, to_device
from sparsedp.core.clip import Clip, FlatClip, NoClip
from sparsedp.core.errors import PrivacyError
from sparsedp.core.randomness import PrivateRandomness
from sparsedp.gradients.query import Engine, Query
from sparsedp.methods.controller import Controller
from sparsedp.privacy.ledger import Charge, Ledger
from sparsedp.privacy.mechanism import privatize
from sparsedp.privacy.plan import Phase, Plan
from sparsedp.privacy.released import Released
from sparsedp.training.apply import SupportOptimizer, set_to_zero
from sparsedp.training.state import own_generators


@dataclass(frozen=True, slots=True)
class PrivateStep:
    """Everything a step needs; calling it takes the step."""

    model: nn.Module
    plan: Plan
    controller: Controller
    engine: Engine
    optimizer: SupportOptimizer
    ledger: Ledger
    randomness: PrivateRandomness

    def __call__(self, step: int, batch: Iterable[MicroBatch]) -> Released:
        """Charge, release, move the support, learn from the release.

        **Privacy.** `privatize` is the only door: all before it is public, all after it is post-processing.
        """
        phase = self.plan.phase_at(step)
        setting = self.controller.setting(step)
        if setting.change is not None and setting.change.prune:
            set_to_zero(self.model, self.engine.layout, setting.change.left)
        with buffers_untouched(self.model):
            released = privatize(
                self.engine,
                batch,
                Query(setting.support, clip_of(phase), setting.geometry, setting.per_sample_top),
                expected_batch_size=self.plan.expected_batch_size(phase),
                charge=Charge(phase.name, step, phase.sampling_rate, phase.noise_multiplier),
                ledger=self.ledger,
                randomness=self.randomness,
                absolute_noise_std=phase.noise_std or 0.0,
            )
        self.optimizer.apply(released)
        self.controller.observe(released)
        return released


def clip_of(phase: Phase) -> Clip:
    """The phase's clip; none for the ablation without one."""
    return NoClip() if phase.clip_norm is None else FlatClip(phase.clip_norm)


@torch.no_grad()
def try_loss(model: nn.Module, loss: PerSampleLoss, rows: Rows) -> None:
    """Run the model once before anything is spent or written, so that mistakes show first.

    Raises:
        SparseDPError: the loss is not one number per row.
        PrivacyError: the forward pass writes to buffers.
    """
    device = next(model.parameters()).device
    with own_generators(0, device), buffers_untouched(model):
        check_losses(loss(model, to_device(rows, device)), row_count(rows))


@contextmanager
def buffers_untouched(model: nn.Module) -> Iterator[None]:
    """Refuse a model whose forward pass writes to its buffers.

    **Privacy.** A running mean or a counter of batches is computed from private rows without noise, and buffers are
    saved with the model.
    """
    before = _buffer_versions(model)
    yield
    after = _buffer_versions(model)
    if after != before:
        changed = sorted(name for name, version in after.items() if before.get(name) != version)
        raise PrivacyError(
            f"the model's buffers {changed[:6]} changed while it looked at private data, without any noise; "
            "switch off running statistics (track_running_stats=False) or move that state out of the model"
        )


def _buffer_versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    return {name: (id(buffer), buffer._version) for name, buffer in model.named_buffers()}
