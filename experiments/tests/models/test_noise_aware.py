"""Optimizers that know a release's noise, against NumPy and against what they are said to do."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import sparsedp
from sparsedp_experiments.models.noise_aware import AdamBC, LowPassSGD

pytestmark = pytest.mark.usefixtures("checked_once")


def gradients(steps, size=5):
    return np.random.default_rng(4).normal(size=(steps, size))


def walk(optimizer, parameter, all_gradients, scales=None):
    for step, gradient in enumerate(all_gradients):
        parameter.grad = torch.tensor(gradient)
        if scales is not None:
            optimizer.observe_noise(parameter, torch.full_like(parameter, scales[step] ** 2))
        optimizer.step()
    return parameter.detach().numpy()


def test_the_noise_variance_is_taken_from_the_second_moment():
    """Written out as sums over all steps, not as a recursion."""
    given, scales, lr, first, second, floor = gradients(7), np.linspace(0.2, 0.8, 7), 0.3, 0.8, 0.9, 1e-3
    parameter = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    found = walk(AdamBC([parameter], lr, (first, second), floor), parameter, given, scales)
    place = np.zeros(5)
    for t in range(1, 8):
        ages = np.arange(t)[::-1]
        of_first = (first**ages) / (first**ages).sum()
        of_second = (second**ages) / (second**ages).sum()
        mean = of_first @ given[:t]
        own = of_second @ (given[:t] ** 2 - scales[:t, None] ** 2)
        place -= lr * mean / np.sqrt(np.maximum(own, floor))
    np.testing.assert_allclose(found, place, rtol=1e-10)


def test_without_noise_it_is_adam():
    given = gradients(6)
    ours, torchs = (nn.Parameter(torch.ones(5, dtype=torch.float64)) for _ in range(2))
    found = walk(AdamBC([ours], 0.1, floor=1e-30), ours, given, np.zeros(6))
    expected = walk(torch.optim.Adam([torchs], 0.1, eps=0.0), torchs, given)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_the_low_pass_is_a_weighted_mean_of_pairs():
    given, a, lr = gradients(6), 0.7, 0.5
    parameter = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    found = walk(LowPassSGD([parameter], lr, a), parameter, given)
    place = np.zeros(5)
    for t in range(1, 7):
        weights = np.zeros(t)
        for one in range(t):
            age = a ** (t - 1 - one) * (1 - a) / 2
            weights[one] += age
            if one:
                weights[one - 1] += age
        place -= lr * (weights / weights.sum()) @ given[:t]
    np.testing.assert_allclose(found, place, rtol=1e-10)


def trained(method, optimizer, out=None, **more):
    torch.manual_seed(0)
    x = torch.randn(120, 4)
    model = nn.Linear(4, 2)
    return sparsedp.fit(
        model, TensorDataset(x, (x[:, 0] > 0).long()), nn.CrossEntropyLoss(reduction="none"), method=method,
        optimizer=lambda ps: optimizer(ps, lr=0.05),
        epsilon=8, delta=1e-3, epochs=4, batch_size=30, seed=1, accountant="rdp",
        progress=False, run_dir=out, **more,
    )  # fmt: skip


@pytest.mark.parametrize("optimizer", [AdamBC, LowPassSGD])
def test_a_stopped_run_goes_on_to_the_same_weights(tmp_path, optimizer):
    class StopError(Exception):
        pass

    def stop(event):
        if getattr(event, "epoch", 0) == 3:
            raise StopError

    with pytest.raises(StopError):
        trained("tp-topk", optimizer, tmp_path / "run", callbacks=(stop,))
    resumed = trained("tp-topk", optimizer, tmp_path / "run", resume=True).model.state_dict()
    whole = trained("tp-topk", optimizer).model.state_dict()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
