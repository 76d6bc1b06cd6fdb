"""Federated training over Flower: a strategy for its `ServerApp`, and a `ClientApp`. Needs `sparsedp[flower]`."""

from sparsedp.flower.client import client_app
from sparsedp.flower.server import SparseDPStrategy, server_app

__all__ = ["SparseDPStrategy", "client_app", "server_app"]
