"""A verified ledger: what was charged, line by line, and which files the run wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, final

from sparsedp.errors import PrivacyError
from sparsedp.privacy.accountants import accountant as accountant_named
from sparsedp.privacy.canonical import FrozenMap
from sparsedp.privacy.events import Spend, merged
from sparsedp.privacy.plan import Plan

FORMAT = 2
"""Format 1, of unreleased versions, did not bind the run's other files to the chain; it is refused."""


class PaidSteps(NamedTuple):
    """Consecutive steps of one phase, paid for together."""

    phase: str
    first_step: int
    steps: int
    sampling_rate: float
    noise_multiplier: float


class Torn(NamedTuple):
    """An unfinished end of the file, and the block it counts as."""

    lost: bytes
    block: PaidSteps


class FilesLine(NamedTuple):
    """Files that were about to be written: the line's number, from 1, and their SHA-256 by name."""

    number: int
    sha256: FrozenMap


class Closing(NamedTuple):
    """A line after which nothing more is charged: its number, from 1, and the plan that got what was left."""

    number: int
    successor: Plan


@final
@dataclass(frozen=True, slots=True)
class VerifiedLedger:
    """A verified ledger.

    Attributes:
        unit: what one unit of privacy is.
        units: how many there are.
        plan: fingerprint of the plan it was opened for.
        delta: the plan's delta; None for a plan without one.
        created: when, in UTC.
        planned: every phase of the plan as one block.
        block: most steps in a block.
        sealed: what was charged by complete lines, in order, without gaps.
        heads: the hash of every complete line.
        torn: an unfinished end of the file, if there is one.
        files: what was to be written when, in order.
        closings: the lines that closed it, the first for good; none while its run can still be resumed.
    """

    unit: str
    units: int
    plan: str
    delta: float | None
    created: str
    planned: tuple[PaidSteps, ...]
    block: int
    sealed: tuple[PaidSteps, ...]
    heads: tuple[str, ...]
    torn: Torn | None = None
    files: tuple[FilesLine, ...] = ()
    closings: tuple[Closing, ...] = ()

    def known(self, name: str) -> tuple[str, ...]:
        """The digests a file of the run may have: the last one written down.

        **Edge cases.** A file is written after its line. So if that line is the last one of all, the file may still
        be the one before: the run was killed in between.
        """
        lines = [line for line in self.files if name in line.sha256]
        kept = 2 if lines and lines[-1].number == self.length and self.torn is None else 1
        return tuple(str(line.sha256[name]) for line in lines[-kept:])

    @property
    def blocks(self) -> tuple[PaidSteps, ...]:
        """All that counts as spent: the sealed blocks, and one for a torn end."""
        return (*self.sealed, self.torn.block) if self.torn else self.sealed

    @property
    def head(self) -> str:
        """Hash of the last line: it seals the whole file."""
        return self.heads[-1]

    @property
    def charged_head(self) -> str:
        """Hash of the last line before it was closed; of the last line if it is open."""
        return self.heads[self.closings[0].number - 2] if self.closings else self.head

    @property
    def length(self) -> int:
        """Number of sealed lines."""
        return len(self.heads)

    @property
    def charged(self) -> int:
        """Steps paid for."""
        return sum(block.steps for block in self.blocks)

    @property
    def planned_steps(self) -> int:
        """Steps of the whole plan."""
        return sum(block.steps for block in self.planned)

    def next_block(self) -> PaidSteps:
        """The block that pays for the first step not charged: at most 1 % of the plan, within one phase.

        **Edge cases.** With everything charged, and in a closed ledger, it has no steps.
        """
        first = self.charged
        for phase in self.planned:
            left = phase.first_step + phase.steps - first
            if left > 0:
                break
        return phase._replace(first_step=first, steps=0 if self.closings else min(self.block, left))

    def extended(self, block: PaidSteps, head: str) -> VerifiedLedger:
        """The record with one more line."""
        return replace(self, sealed=(*self.sealed, block), heads=(*self.heads, head), torn=None)

    def noting(self, files: Mapping[str, str], head: str) -> VerifiedLedger:
        """The record with one more line about files."""
        line = FilesLine(self.length + 1, FrozenMap(files))
        return replace(self, files=(*self.files, line), heads=(*self.heads, head))

    def closed(self, successor: Plan, head: str) -> VerifiedLedger:
        """The record with one more line, after which nothing is charged."""
        closing = Closing(self.length + 1, successor)
        return replace(self, closings=(*self.closings, closing), heads=(*self.heads, head))

    def spends(self) -> tuple[Spend, ...]:
        """Everything charged, equal mechanisms added up."""
        return _added_up(self.blocks)

    def committed(self) -> tuple[Spend, ...]:
        """The most its run can ever spend: the whole plan, or what was charged when the ledger was closed."""
        return self.spends() if self.closings else _added_up(self.planned)

    def spent(self, delta: float | None = None, accountant: str = "pld") -> float:
        """Epsilon of everything charged, for one unit, at `delta` (the header's by default).

        **Privacy.** Of a run stopped early this holds only if the stop did not depend on what was released; the
        planned epsilon holds always.
        """
        chosen = self.delta if delta is None else delta
        if chosen is None:
            raise PrivacyError(
                "delta: the ledger names none; pass delta=, well below 1 / the number of units"
            )
        return accountant_named(accountant).epsilon(self.spends(), chosen)

    def expect(self, head: str, length: int) -> None:
        """Check that this ledger goes on from a known state (a checkpoint's, a record's).

        Raises:
            PrivacyError: it is shorter, or differs in what was there already: lines were removed or rewritten.
        """
        if length > self.length:
            raise PrivacyError(
                f"the ledger has {self.length} lines, but {length} were known: lines were removed; restore the file"
            )
        if length < 1 or self.heads[length - 1] != head:
            raise PrivacyError(
                f"the ledger's line {length} is not the one known before: the file was rewritten; restore it"
            )


def _added_up(blocks: Iterable[PaidSteps]) -> tuple[Spend, ...]:
    return merged(Spend(b.sampling_rate, b.noise_multiplier, b.steps) for b in blocks)
