"""An outside check: the dense clipped sums of the papers' CNNs are those of Opacus's hooks.

Opacus scales a sample by C/(norm + 1e-6) and we by C/(1 + 1e-3)/norm, so Opacus is asked with a bound that makes the
two factors equal for clipped samples to 1e-6/norm; norms here are above 1, and C is well below every norm, so that
every sample is clipped.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsedp.batch import MicroBatch, from_criterion
from sparsedp.clipping import ROUNDING_MARGIN, FlatClip
from sparsedp.grad_sample import ENGINES, ClippedSumQuery
from sparsedp.parameters import Support
from sparsedp_experiments.models import dp_cnn, mnist_cnn

MODELS = {"mnist-cnn": (mnist_cnn, (1, 28, 28), 24), "dp-cnn": (dp_cnn, (3, 32, 32), 6)}
CLIP_NORM = 0.5


def opacus_clipped_sum(model: nn.Module, rows: tuple[Tensor, Tensor], clip_norm: float) -> Tensor:
    """The sum Opacus's DPOptimizer forms before it adds noise."""
    opacus = pytest.importorskip("opacus")
    from opacus.optimizers import DPOptimizer

    wrapped = opacus.GradSampleModule(model)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=clip_norm,
        expected_batch_size=len(rows[0]),
    )
    F.cross_entropy(wrapped(rows[0]), rows[1]).backward()
    norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in model.parameters()]).norm(dim=0)
    assert float(norms.min()) > max(1.0, 1.5 * CLIP_NORM)
    optimizer.clip_and_accumulate()
    return torch.cat([p.summed_grad.reshape(-1) for p in model.parameters()]).double()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", MODELS)
def test_dense_clipped_sums_are_those_of_opacus(name):
    build, shape, samples = MODELS[name]
    torch.manual_seed(0)
    model = build(shape, 10)
    rows = (4 * torch.randn(samples, *shape), torch.randint(0, 10, (samples,)))
    loss = from_criterion(nn.CrossEntropyLoss(reduction="none"))
    engine = ENGINES["bookkeeping"](model, loss)
    query = ClippedSumQuery(Support.full(engine.layout.dimension), FlatClip(CLIP_NORM))
    ours = engine.clipped_sum([MicroBatch(rows)], query)
    theirs = opacus_clipped_sum(model, rows, CLIP_NORM / (1 + ROUNDING_MARGIN))
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
