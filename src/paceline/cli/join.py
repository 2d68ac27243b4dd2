"""`paceline join`: a worker by hand, in this terminal, for a job that is under way.

It asks the coordinator for a place and then becomes the script (exec), with the environment of a
newcomer. On another host, the coordinator's address and a copy of the secret file have to be given.
"""

from __future__ import annotations

import os
from pathlib import Path

from paceline.cluster.operator import Operator
from paceline.cluster.policy import Policy
from paceline.cluster.secret_file import load_secret
from paceline.config import inherited_environ
from paceline.console import say
from paceline.errors import UsageError
from paceline.launcher.elastic.facts import find_job, jobs
from paceline.launcher.elastic.plan import ElasticPlan
from paceline.launcher.environment import JobAddresses, process_environ
from paceline.launcher.machine import usable_cores
from paceline.launcher.seat import Seat
from paceline.launcher.servers import ServerPlan
from paceline.launcher.spec import RunSpec
from paceline.mesh import Mesh
from paceline.pace.schedule import Schedule


def join(
    words: list[str],
    *,
    is_module: bool,
    pace: Schedule | None,
    coordinator: str | None,
    secret_file: Path | None,
) -> int:
    """Become a worker of a running job; does not return when all is well."""
    environ = inherited_environ()
    where, words, told = _find(words, coordinator, secret_file)
    if not words:
        raise UsageError("name the script to run: paceline join [JOB] SCRIPT [ARGUMENTS]...")
    operator = Operator.connect(where.coordinator, load_secret(where.secret_file), where.job_id)
    try:
        policy = operator.status().policy
        spec = _spec(policy, words, is_module, pace)
        place = operator.reserve("worker")
    finally:
        operator.close()
    if pace is not None:
        told.pop("PACELINE_PACE", None)
    environ.update({name: text for name, text in told.items() if text})
    seat = Seat(place.rank, place.number, is_newcomer=True)
    environ = process_environ(environ, spec, seat, where, cores=usable_cores())
    say(f"joining job {where.job_id} as worker {place.number}")
    argv = spec.program(seat).argv
    os.execve(argv[0], argv, environ)


def _find(
    words: list[str], coordinator: str | None, secret_file: Path | None
) -> tuple[JobAddresses, list[str], dict[str, str]]:
    """Find out which job is meant; the first word names it, unless there is only one.

    Also returned: the variables with what its launcher was given.
    """
    if (coordinator is None) != (secret_file is None):
        raise UsageError("give both --coordinator HOST:PORT and --secret-file FILE, or neither")
    if coordinator is not None:
        if len(words) < 2:
            raise UsageError(
                "with --coordinator the job's id comes before the script: paceline join"
                " --coordinator ... --secret-file ... ID SCRIPT; `paceline status` shows the id"
            )
        where = JobAddresses(
            job_id=words[0], coordinator=coordinator, secret_file=str(secret_file), master_port=0
        )
        return where, words[1:], {}
    environ = inherited_environ()
    names = {name for job in jobs(environ) for name in (job.facts.name, job.facts.job_id)}
    name = words[0] if words and words[0] in names else None
    facts = find_job(name, environ).facts
    where = JobAddresses(
        job_id=facts.job_id,
        coordinator=facts.coordinator,
        secret_file=facts.secret_file,
        master_port=facts.master_port,
    )
    told = {"PACELINE_PACE": facts.pace, "PACELINE_PRECISION": facts.precision}
    return where, words[1:] if name else words, told


def _spec(policy: Policy, words: list[str], is_module: bool, pace: Schedule | None) -> RunSpec:
    return RunSpec(
        target=words[0],
        arguments=tuple(words[1:]),
        is_module=is_module,
        num_workers=policy.num_workers,
        servers=ServerPlan(count=policy.num_servers, replicas=policy.replicas),
        pace=pace,
        mesh=Mesh.parse(policy.mesh) if policy.mesh else None,
        elastic=ElasticPlan(
            min_workers=policy.min_workers,
            max_workers=policy.max_workers,
            max_servers=max(policy.max_servers, policy.partitions),
            on_loss=policy.on_loss,
        ),
    )
