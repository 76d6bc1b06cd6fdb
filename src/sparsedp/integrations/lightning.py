"""Lightning: a module whose `Trainer.fit` is a private run."""

from __future__ import annotations

from typing import Any

import lightning
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from sparsedp.batch import PerExampleLoss, check_losses, per_sample_loss, row_count
from sparsedp.evaluation import classification_metrics, threshold_of
from sparsedp.private_training import make_private
from sparsedp.results import Result


class PrivateModule(lightning.LightningModule):  # type: ignore[misc]
    """A model, its optimizer, its loader and its loss, for `lightning.Trainer(max_epochs=...).fit(module)`.

    Args:
        model: trained in place.
        optimizer: any `torch.optim` optimizer over its parameters.
        loader: of the training data, as in `make_private`.
        loss_fn: with `reduction="none"`, or `PerExampleLoss`.
        privacy: further arguments of `make_private`: epsilon, epochs, method, out, ...; `epochs` must be the
            trainer's `max_epochs`.

    **Privacy.** That of `make_private`. Training losses are not logged; validation losses of held-out data are.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loader: DataLoader[Any],
        loss_fn: Any,
        **privacy: Any,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._loss = per_sample_loss(loss_fn)
        self._pairs = not isinstance(loss_fn, PerExampleLoss)
        self._threshold = threshold_of(loss_fn)
        self._run = make_private(model, optimizer, loader, loss_fn, **privacy)
        self.private = self._run.model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        return self.private(*args, **kwargs)

    def train_dataloader(self) -> Any:
        """Private batches, an epoch at a time."""
        return self._run.loader

    def configure_optimizers(self) -> None:
        """None: the private step is taken in `training_step`."""

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        """Training rows are on the model's device already, and must stay the ones that were given."""
        return batch if self.training else super().transfer_batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """One private step."""
        criterion = self._run.criterion
        loss = criterion(self.private(batch[0]), batch[1]) if self._pairs else criterion(self.private, batch)
        loss.backward()  # nothing is computed: a loop of `make_private`
        released = self._run.optimizer.step().released
        self.log("released_norm", float(released.mean.norm()), batch_size=1)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss on held-out rows, and for (input, target) pairs the accuracy."""
        losses = check_losses(self._loss(self.private, batch), row_count(batch))
        self.log("val_loss", losses.mean(), batch_size=len(losses))
        if self._pairs:
            found = classification_metrics(self.private(batch[0]), batch[1], self._threshold)
            self.log_dict({f"val_{name}": value for name, value in found.items()}, batch_size=len(losses))
        return losses.mean()

    def result(self) -> Result:
        """What the run gave, once `fit` is done."""
        return self._run.finish()
