"""What a user asks of `fit`, with the gaps filled, as a plan."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from sparsedp.core.errors import PrivacyError
from sparsedp.methods import Method, MethodOptions, Protection
from sparsedp.methods.planning import ClipNorm, build_plan, draft_plan
from sparsedp.privacy.calibrate import Split
from sparsedp.privacy.normalisation import PrivateNormalisation
from sparsedp.privacy.plan import Plan
from sparsedp.runs.folder import RunFolder
from sparsedp.training.defaults import CLIP_NORM, EPOCHS, EPSILON, default_batch_size, default_delta
from sparsedp.training.identity import same_request

logger = logging.getLogger("sparsedp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The privacy half of `fit`'s arguments; see there. None is a gap, filled from public numbers."""

    method: Method
    options: MethodOptions | None
    units: int
    unit: str
    epsilon: float | None
    delta: float | None
    epochs: int | None
    batch_size: int | None
    clip_norm: ClipNorm | None
    warmup_fraction: float
    split: Split
    noise_std: float | None
    accountant: str
    normalise: PrivateNormalisation | None = None

    def new_plan(self) -> Plan:
        """The calibrated plan."""
        draft = self._draft()
        return build_plan(
            self.method,
            self.options,
            units=self.units,
            batch_size=self._batch_size,
            epochs=self._epochs,
            epsilon=self._epsilon,
            delta=draft.delta,
            clip_norm=self._clip_norm,
            unit=self.unit,
            accountant=self.accountant,
            warmup_fraction=self.warmup_fraction,
            split=self.split,
            noise_std=self.noise_std,
            normalise=self.normalise,
        )

    def saved_plan(self, out: Path | str) -> Plan:
        """The plan of the run at `out`, if that is what is asked for; its noise is kept as it was calibrated.

        Raises:
            PrivacyError: it is another plan, and in what it differs.
        """
        saved = RunFolder.open(out).plan()
        same_request(saved, self._draft())
        asked = (self._epsilon, self.accountant if self.method.private else None)
        if (saved.target_epsilon, saved.accountant) != asked:
            raise PrivacyError(
                f"the run was planned for epsilon {saved.target_epsilon} by {saved.accountant}, and is asked for "
                f"epsilon {asked[0]} by {asked[1]}; a plan is never changed on the way"
            )
        return saved

    def _draft(self) -> Plan:
        return draft_plan(
            self.method,
            self.options,
            units=self.units,
            batch_size=self._batch_size,
            epochs=self._epochs,
            clip_norm=self._clip_norm,
            delta=self._delta(),
            unit=self.unit,
            warmup_fraction=self.warmup_fraction,
            noise_std=self.noise_std,
            normalise=self.normalise,
        )

    @property
    def _epochs(self) -> int:
        return EPOCHS if self.epochs is None else self.epochs

    @property
    def _batch_size(self) -> int:
        return default_batch_size(self.units) if self.batch_size is None else self.batch_size

    @property
    def _epsilon(self) -> float | None:
        return EPSILON if self.epsilon is None and self.method.private else self.epsilon

    @property
    def _clip_norm(self) -> ClipNorm | None:
        clips = self.method.protection is not Protection.NO_CLIP
        return CLIP_NORM if self.clip_norm is None and clips else self.clip_norm

    def _delta(self) -> float | None:
        if self.delta is not None or not self.method.private:
            return self.delta
        chosen = default_delta(self.units)
        logger.info("delta was not given: it is %g, safe for %d units (%s)", chosen, self.units, self.unit)
        return chosen
