"""`paceline hosts`: lists the hosts of a running job, adds one, removes one."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from paceline.cli.job_commands import operating
from paceline.errors import UsageError
from paceline.launcher.elastic.host_requests import one_host
from paceline.launcher.job_registry import find_job
from paceline.runtime.config import inherited_environ

_ACTIONS = ("add", "remove")


def hosts(words: Sequence[str]) -> int:
    """Print the hosts of a job, or change them: [JOB] [add HOST[:SLOTS] | remove HOST]."""
    given = list(words)
    name = given.pop(0) if given and given[0] not in _ACTIONS else None
    action, host = "list", ""
    if given:
        action, *rest = given
        if action not in _ACTIONS or len(rest) != 1:
            raise UsageError(
                "write paceline hosts [JOB], or with add HOST[:SLOTS], or with remove HOST; for"
                " example `paceline hosts add c:4`"
            )
        host = str(one_host(rest[0])) if action == "add" else rest[0].strip("[]")
    found = find_job(name, inherited_environ())
    with operating(found) as operator:
        text = operator.change_hosts(action, host)
    sys.stdout.write(f"{text}\n")
    return 0
