"""Which objects of the script are saved by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from paceline.data_parallel.distribute import distributed
from paceline.errors import UsageError
from paceline.job import Job

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def saved_objects(job: Job, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given objects, and those of `pl.carry`; not what is distributed anyway."""
    pairs = [(model, optimizer) for model, optimizer, _ in distributed()]
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
