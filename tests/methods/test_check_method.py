"""`sparsedp.testing.check_method` passes every method of the library and fails methods that break a rule."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from sparsedp.methods.catalog import get_method, list_methods
from sparsedp.methods.scores import ByScore, register_ranking
from sparsedp.testing import check_method


@dataclass(frozen=True, slots=True)
class DrawsItsOwn(ByScore):
    """Scores by the global generator: the same releases give another support."""

    name: str = "test-draws-its-own"

    def init(self, dimension):
        return {"sum": torch.zeros(dimension, dtype=torch.float64)}

    def update(self, state, seen):
        return {"sum": state["sum"] + seen.gradient}

    def scores(self, state):
        return torch.rand_like(state["sum"])


class Remembers(DrawsItsOwn):
    """Keeps the sum in itself: a run that is resumed has lost it."""

    __slots__ = ()
    kept: ClassVar[dict] = {}

    def init(self, dimension):
        self.kept.clear()
        return {"steps": torch.zeros(dimension, dtype=torch.float64)}

    def update(self, state, seen):
        self.kept["sum"] = self.kept.get("sum", 0) + seen.gradient
        return {"steps": state["steps"] + 1}

    def scores(self, state):
        return self.kept["sum"]


@pytest.mark.parametrize("method", list_methods(), ids=lambda method: method.name)
def test_check_method_every_private_method_passes(method):
    check_method(method)


@pytest.mark.parametrize(
    ("ranking", "message"),
    [
        (DrawsItsOwn("test-draws"), "another support"),
        (Remembers("test-remembers"), "resumed at|another support"),
    ],
)
def test_check_method_broken_score_raises(ranking, message):
    broken = replace(get_method("tp-topk"), name=ranking.name, ranking=register_ranking(ranking))
    with pytest.raises(AssertionError, match=message):
        check_method(broken)


def test_check_method_unregistered_score_raises():
    broken = replace(get_method("tp-topk"), name="unregistered", ranking=DrawsItsOwn("never registered"))
    with pytest.raises(Exception, match="ranking"):
        check_method(broken)
