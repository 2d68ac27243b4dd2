"""An object of the script whose state newcomers receive: `pl.carry(scheduler=scheduler)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.elastic.plain import put_together, take_apart
from paceline.elastic.protocol import Change, Parcel
from paceline.errors import UsageError


class Carried:
    """Packs what `state_dict()` gives."""

    def __init__(self, name: str, thing: Any) -> None:
        lacking = [m for m in ("state_dict", "load_state_dict") if not hasattr(thing, m)]
        if lacking:
            raise UsageError(
                f"carry({name}=...): a {type(thing).__name__} has no {' and no '.join(lacking)}()"
            )
        self._name, self._thing = name, thing

    def tell(self) -> None:
        """Nothing has to be known before the change is decided."""

    def pack(self) -> Parcel:
        """Return its state."""
        return take_apart(self._thing.state_dict(), f"carry({self._name}=...)")

    def unpack(self, plain: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Load the state of a peer's."""
        self._thing.load_state_dict(put_together(plain, tensors))

    def resume(self, change: Change) -> None:
        """It knows nothing of workers."""
