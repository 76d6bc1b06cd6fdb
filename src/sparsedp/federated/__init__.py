"""Training without pooling data: clients train at home, the server sums integers and adds the noise.

Nothing here knows a network; `sparsedp.flower` carries it over Flower.
"""

from sparsedp.federated.client import Client, Held, NothingHeldError
from sparsedp.federated.local import LocalSGD, LocalTraining
from sparsedp.federated.server import FederatedTrainer, Round, RoundReport
from sparsedp.federated.task import Task

__all__ = [
    "Client",
    "FederatedTrainer",
    "Held",
    "LocalSGD",
    "LocalTraining",
    "NothingHeldError",
    "Round",
    "RoundReport",
    "Task",
]
