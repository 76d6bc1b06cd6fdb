"""Training without pooling data: clients train at home, the server sums integers and adds the noise.

Nothing here knows a network; `sparsedp.flower` carries it over Flower.
"""

from sparsedp.federated.client import Client
from sparsedp.federated.local import LocalCounting, LocalSGD, LocalTraining
from sparsedp.federated.rounds import Round, RoundReport
from sparsedp.federated.server import FederatedTrainer
from sparsedp.federated.task import CountAsked, Task

__all__ = [
    "Client",
    "CountAsked",
    "FederatedTrainer",
    "LocalCounting",
    "LocalSGD",
    "LocalTraining",
    "Round",
    "RoundReport",
    "Task",
]
