"""The parameters that a user's loop trains: the same tensors from first to last, with no gradient on them."""

from __future__ import annotations

from typing import final

from torch import nn

from sparsedp.errors import ModelError, SparseDPError


@final
class TrainedParameters:
    """What the optimizer moves, by name, as it was when the run began."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known = {
            name: (p, p.dtype, p.device) for name, p in model.named_parameters() if p.requires_grad
        }

    def check_same(self) -> None:
        """Refuse a model that holds other tensors by now: the optimizer would move the old ones, and nothing else.

        Raises:
            ModelError: some are others, or of another type, or elsewhere.
        """
        now = dict(self._model.named_parameters())
        others = [
            name
            for name, (p, dtype, device) in self._known.items()
            if now.get(name) is not p or (p.dtype, p.device) != (dtype, device)
        ]
        if others:
            raise ModelError(
                f"the model's parameters {others[:6]} are not the ones that make_private was given: they were "
                "replaced (load_state_dict(..., assign=True), a new layer) or moved to another dtype or device. The "
                "optimizer would move the old ones, so no step is taken; copy values into the parameters that are "
                "there, or call make_private again for the changed model"
            )

    def check_no_gradient(self) -> None:
        """Refuse gradients that the user's own code has put on them.

        Raises:
            SparseDPError: there are some.
        """
        found = [name for name, (p, _, _) in self._known.items() if p.grad is not None]
        if found:
            raise SparseDPError(
                f"the parameters {found[:6]} hold a .grad, from a backward() of something else than the loop's loss, "
                "which the private step would throw away. Decay weights by the optimizer's weight_decay, put any "
                "other penalty into loss_fn, row by row; model.zero_grad() clears what is there"
            )
