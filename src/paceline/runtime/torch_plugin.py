"""Registers the backend "paceline" with torch.distributed.

torch calls `register()` during every `import torch` of an environment in which Paceline is
installed, so it only registers two names: everything else is imported on first use.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from typing import Any


def register() -> None:
    """Register backend "paceline", and let env:// use our control plane. Never raises."""
    try:
        from torch.distributed import Backend

        if "PACELINE" in Backend._plugins:
            return
        Backend.register_backend("paceline", _create_group, extended_api=True, devices=["cpu"])
        # By its full name: the package has a function of the same name as the module.
        handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
        theirs = handlers["env"]
    except Exception as error:  # a torch that lacks these must still be importable
        logging.getLogger("paceline").warning(
            "backend 'paceline' is not available in this torch (2.13 is known to work): %r", error
        )
        return

    def meet(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        from paceline.runtime.torch_init import control_plane_rendezvous

        return control_plane_rendezvous(url) or theirs(url, **options)

    handlers["env"] = meet
    _note_requests()
    _stand_in_for_gloo()


def _note_requests() -> None:
    """Learn which groups have several backends, if this torch lets ours be one of them."""
    import torch.distributed as dist

    from paceline.comm.torch.requested import can_be_a_part, note_requests

    if can_be_a_part():
        note_requests(dist)


def _stand_in_for_gloo() -> None:
    """With PACELINE_AS_GLOO=1, libraries that ask for gloo get our backend."""
    from paceline.runtime.config import inherited_environ

    asked = inherited_environ().get("PACELINE_AS_GLOO", "")
    if asked in ("", "0"):
        return
    import torch.distributed as dist

    from paceline.comm.torch.as_gloo import stand_in_for_gloo

    stand_in_for_gloo(importlib.import_module("torch.distributed.distributed_c10d"), dist)


def _create_group(options: Any, pg_options: Any) -> Any:
    from paceline.runtime.torch_init import create_group

    return create_group(options, pg_options)
