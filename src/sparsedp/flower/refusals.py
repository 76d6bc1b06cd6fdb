"""Flower's own privacy settings, which must stay off: noise and clipping have one place each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod

from sparsedp.errors import PrivacyError


def check_mods(mods: Sequence[Any]) -> None:
    """Refuse the mods that clip or noise what a client sends.

    Raises:
        PrivacyError: which.
    """
    private = [
        mod for mod in mods if isinstance(mod, LocalDpMod) or mod in (fixedclipping_mod, adaptiveclipping_mod)
    ]
    if private:
        names = [getattr(mod, "__name__", type(mod).__name__) for mod in private]
        raise PrivacyError(
            f"mods: got {names}, which change updates by rules that no ledger knows; leave them out. sparsedp clips "
            "at the client and again at the server, and adds the noise at the server"
        )
