"""Training without pooling data: clients train on their own data, the server sums integers and adds the noise.

Nothing here knows a network; `sparsedp.integrations.flower` carries it over Flower.
"""

from sparsedp.federated.client import Client, LocalCounting, LocalSGD, LocalTraining
from sparsedp.federated.messages import ClientTask, Payload
from sparsedp.federated.server import FederatedTrainer, RejectedUpdate, Round, RoundReport

__all__ = [
    "Client",
    "ClientTask",
    "FederatedTrainer",
    "LocalCounting",
    "LocalSGD",
    "LocalTraining",
    "Payload",
    "RejectedUpdate",
    "Round",
    "RoundReport",
]
