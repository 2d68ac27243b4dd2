"""The models of this process that are distributed in parts."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

from paceline.data_parallel.pace_switch.switcher import PaceSwitcher

if TYPE_CHECKING:
    from paceline.model_parallel.mesh_model import Meshed

meshed: weakref.WeakKeyDictionary[nn.Module, Meshed] = weakref.WeakKeyDictionary()


def meshed_by(switcher: PaceSwitcher) -> Meshed | None:
    """Return the model in parts that is trained by this; None: it is a whole one."""
    return next((made for made in meshed.values() if made.switcher is switcher), None)
