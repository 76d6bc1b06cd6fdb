"""Training without pooling data: clients train on their own data, the server sums integers and adds the noise.

Nothing here knows a network; `sparsedp.integrations.flower` carries it over Flower.
"""

from sparsedp.federated.client import Client as Client
from sparsedp.federated.client import LocalSGD as LocalSGD
from sparsedp.federated.messages import ClientTask as ClientTask
from sparsedp.federated.messages import Payload as Payload
from sparsedp.federated.server import FederatedTrainer as FederatedTrainer
from sparsedp.federated.server import Round as Round
from sparsedp.federated.server import RoundReport as RoundReport
