"""What has moved since a run was last saved whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from torch import Tensor, nn

from sparsedp.core.layout import Layout
from sparsedp.core.support import Support
from sparsedp.optimizers.apply import SupportOptimizer
from sparsedp.optimizers.compact import CompactOptimizer
from sparsedp.optimizers.places import places_in
from sparsedp.runs.moved import Entries

LITTLE = 4
"""A state between two full ones is worth it below one over so many of the full one's numbers."""


@final
class Since:
    """Follows the supports of an optimizer that moves nothing else, from one full checkpoint to the next.

    **Edge cases.** Weights that anybody else writes to (a user, pruning, an average put in place) show by PyTorch's
    version counters, and then the next checkpoint is a full one. So it is with optimizers that hold every coordinate.
    """

    def __init__(self, model: nn.Module, layout: Layout, applier: SupportOptimizer) -> None:
        self._model, self._layout = model, layout
        self._follows = isinstance(applier, CompactOptimizer)
        self._moved: Support | None = None
        self._last: Support | None = None
        self._versions: tuple[int, ...] = ()
        self._tensors: Mapping[str, Tensor] = {}

    def begin(self, tensors: Mapping[str, Tensor]) -> None:
        """All is kept now, these tensors of the method's among it."""
        self._moved = Support.empty(self._layout.dimension) if self._follows else None
        self._last, self._versions, self._tensors = None, self._now(), tensors

    def about_to_move(self, support: Support) -> None:
        """These coordinates are moved next."""
        if self._moved is None:
            return
        if self._versions != self._now():
            self._moved = None
        elif support is not self._last:
            self._moved, self._last = self._moved.union(support), support

    def has_moved(self) -> None:
        """What was written now was written by the optimizer."""
        self._versions = self._now()

    def kept(self, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
        """The names of tensors that are the same objects as when all was kept."""
        return tuple(name for name, tensor in tensors.items() if self._tensors.get(name) is tensor)

    def is_little(self, *written: Mapping[str, Tensor] | None) -> bool:
        """Whether tensors are few numbers beside all weights."""
        size = sum(tensor.numel() for tensors in written if tensors for tensor in tensors.values())
        return LITTLE * size <= self._layout.dimension

    def entries(self) -> Entries | None:
        """The entries that moved, under every name they have; None if that is not known, or not little."""
        if (
            self._moved is None
            or self._versions != self._now()
            or not self.is_little({"": self._moved.indices})
        ):
            return None
        split = self._moved.split(self._layout)
        parameters = self._layout.parameters(self._model)
        names: dict[int, list[str]] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        places, values = {}, {}
        for slot, parameter in zip(self._layout, parameters, strict=True):
            flat = split[slot.name]
            if not flat.numel():
                continue
            where = places_in(flat, slot.shape, parameter.device)
            found = parameter.detach() if where is None else where.read(parameter.detach())
            for name in names[id(parameter)]:
                places[name], values[name] = flat, found.reshape(-1)
        return Entries(places, values)

    def _now(self) -> tuple[int, ...]:
        return tuple(parameter._version for parameter in self._model.parameters())
