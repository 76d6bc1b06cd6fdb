"""A small model with data, and its per-sample gradients by a plain loop."""

import torch
from torch import nn

from sparsedp.batch import MicroBatch, from_criterion
from sparsedp.parameters import ParameterLayout

LOSS = from_criterion(nn.CrossEntropyLoss(reduction="none"))


def network(seed=0, dtype=torch.float32):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def rows(count=24, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator, dtype=dtype)
    return x, torch.randint(0, 3, (count,), generator=generator)


def batches(count=24, seed=1, dtype=torch.float32):
    """Two uneven micro-batches and an empty one."""
    x, y = rows(count, seed, dtype)
    cut = count // 3
    return [MicroBatch((x[:cut], y[:cut])), MicroBatch((x[:0], y[:0])), MicroBatch((x[cut:], y[cut:]))]


def gradients_by_loop(model, x, y):
    layout, found = ParameterLayout.of(model), []
    for i in range(len(y)):
        model.zero_grad()
        LOSS(model, (x[i : i + 1], y[i : i + 1])).sum().backward()
        found.append(torch.cat([p.grad.reshape(-1).double() for p in layout.parameters(model)]))
    model.zero_grad()
    return torch.stack(found)
