"""Which models and other objects of the script are saved."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from paceline.data_parallel.distribute import distributed
from paceline.data_parallel.succession import Succession
from paceline.errors import UsageError
from paceline.job import Job
from paceline.model_parallel.registry import meshed

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _distributed() -> list[tuple[Any, Succession]]:
    """Return the script's models, whole or in parts, in order."""
    in_parts = {id(made.succession): model for model, made in meshed.items()}
    return [(in_parts.get(id(one), model), one) for model, one in distributed()]


def saved_models(given: Mapping[str, Any]) -> list[Succession]:
    """Return the distributed models that are saved: those given by name, or all there are."""
    known = _distributed()
    chosen = [one for model, one in known if any(thing is model for thing in given.values())]
    return chosen or [one for _, one in known]


def saved_objects(job: Job, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given objects, and those of `pl.carry`; not what is distributed anyway."""
    pairs = [(model, one.optimizer) for model, one in _distributed()]
    covered = {id(thing) for pair in pairs for thing in pair}
    found: dict[str, Any] = {}
    for name, thing in {**job.carried, **given}.items():
        lacking = [m for m in ("state_dict", "load_state_dict") if not hasattr(thing, m)]
        if lacking:
            raise UsageError(
                f"Checkpoint({name}=...): a {type(thing).__name__} has no"
                f" {' and no '.join(lacking)}()"
            )
        if not _NAME.fullmatch(name):
            raise UsageError(f"Checkpoint({name!r}=...): expected a plain name")
        is_known = any(thing is other for other in found.values())
        if id(thing) not in covered and not is_known:
            found[name] = thing
    return found
