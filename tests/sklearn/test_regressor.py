"""SparseDPRegressor: public bounds on the target, both losses, coefficients in the target's units, its guarantee."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import sparsedp
from sparsedp import PrivacyError, SparseDPError
from sparsedp.sklearn import SparseDPRegressor

pytestmark = pytest.mark.usefixtures("checked_once")


def table(rows=3000):
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, size=(rows, 3))
    return X, 20 + X @ np.array([5.0, -3.0, 0.0]) + rng.normal(0, 0.5, rows)


def regressor(**changes):
    given = {"target_bounds": (0, 40), "bounds": (-1, 1), "epochs": 5, "random_state": 0}
    return SparseDPRegressor(**(given | changes))


@pytest.mark.parametrize("loss", ["squared", "huber"])
def test_it_finds_the_coefficients_in_the_units_of_the_target(loss):
    X, y = table()
    model = regressor(loss=loss, epochs=20).fit(X, y)
    assert model.epsilon_ <= 3
    np.testing.assert_allclose(model.coef_, [5, -3, 0], atol=1.0)
    assert model.intercept_ == pytest.approx(20, abs=1.0)
    np.testing.assert_allclose(model.predict(X[:9]), np.clip(X[:9] @ model.coef_ + model.intercept_, 0, 40))
    assert model.score(X, y) > 0.9


@pytest.mark.parametrize(("loss", "criterion"), [("squared", nn.MSELoss), ("huber", nn.HuberLoss)])
def test_the_model_is_what_fit_gives_for_the_scaled_target(loss, criterion):
    X, y = table(200)
    model = regressor(loss=loss, lr=0.3, batch_size=32).fit(X, y)
    by_hand = nn.Sequential(nn.Linear(3, 1))
    for parameter in by_hand.parameters():
        nn.init.zeros_(parameter)
    scaled = torch.tensor(np.clip(y, 0, 40) / 20 - 1).float()[:, None]
    more = {"delta": 0.2} if loss == "huber" else {}
    sparsedp.fit(
        by_hand, TensorDataset(torch.tensor(X).float(), scaled), criterion(reduction="none", **more), epsilon=3.0,
        epochs=5, batch_size=32, lr=0.3, seed=0, progress=False, ema_decay=1.0,
    )  # fmt: skip
    weights = [
        torch.cat([p.detach().reshape(-1) for p in m.parameters()]).double() for m in (model.model_, by_hand)
    ]
    torch.testing.assert_close(*weights, atol=1e-6, rtol=0)


def test_targets_outside_the_bounds_count_as_the_bounds():
    X, y = table(500)
    far = np.where(np.arange(500) == 7, 1e9, y)
    near = np.where(np.arange(500) == 7, 40.0, y)
    models = [regressor().fit(X, one) for one in (far, near)]
    np.testing.assert_array_equal(models[0].coef_, models[1].coef_)


@pytest.mark.nightly
def test_a_network_learns_what_a_line_cannot():
    X, _ = table()
    y = 20 + 10 * X[:, 0] * X[:, 1]
    settings = {"epsilon": 20.0, "epochs": 40, "target_bounds": (10, 30)}
    assert regressor(**settings, hidden_layer_sizes=16).fit(X, y).score(X, y) > 0.5
    assert regressor(**settings).fit(X, y).score(X, y) < 0.1


@pytest.mark.parametrize("bounds", [None, (0, 0), (0, np.inf), 3, (1, 2, 3), ("a", "b")])
def test_bounds_of_the_target_have_to_be_public(bounds):
    with pytest.raises(PrivacyError, match="known without looking at the data"):
        regressor(target_bounds=bounds).fit(*table(100))


def test_a_loss_that_is_none_is_refused():
    with pytest.raises(SparseDPError, match="'squared' or 'huber'"):
        regressor(loss="absolute").fit(*table(100))
