"""Commands that speak with a running job: status, scale, servers, set, stop, join.

A job of this user on this host is found by its name (launcher/elastic/job_facts.py); the
coordinator then answers, whoever started it. What cannot be done is said by the coordinator itself.

`join` asks the coordinator for a place and then becomes the script (exec), with the environment of
a newcomer. On another host it is given the coordinator's address and a copy of the secret file.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.control.client.operator import News, Operator, Status
from paceline.control.member import Member
from paceline.control.membership.policy import Policy
from paceline.control.transport.secret_file import load_secret
from paceline.errors import LaunchError, UsageError
from paceline.launcher.elastic.bounds import ElasticPlan
from paceline.launcher.elastic.job_facts import FoundJob, find_job, jobs, recorded
from paceline.launcher.environment import JobAddresses, process_environ
from paceline.launcher.job_directory import is_held, remove_abandoned
from paceline.launcher.processes.guard import end_processes
from paceline.launcher.roles import ServerPlan
from paceline.launcher.spec import SAVE_GRACE_S, RunSpec
from paceline.pace.schedule import Schedule, parse_schedule
from paceline.runtime.config import inherited_environ, natural_host_id
from paceline.runtime.console import say
from paceline.runtime.machine import processor_s, usable_cores
from paceline.runtime.mesh import Mesh
from paceline.runtime.process_names import Seat

_MEASURE_S = 1.0
_AFTER_GRACE_S = 10.0  # after the job's own grace: for its end


@contextmanager
def operating(found: FoundJob, on_news: Callable[[News], None] | None = None) -> Iterator[Operator]:
    """Speak with a job's coordinator; `on_news` hears from another thread what happens."""
    facts = found.facts
    if not found.is_supervised:
        raise LaunchError(
            f"job {facts.name} runs, but its keeper is gone and with it the coordinator;"
            f" `paceline attach {facts.name}` starts them again"
        )
    secret = load_secret(facts.secret_file)
    operator = Operator.connect(facts.coordinator, secret, facts.job_id, on_news=on_news)
    try:
        yield operator
    finally:
        operator.close()


def status(name: str | None) -> int:
    """Say who is in a job, who is on the way, and where its tables are."""
    found = find_job(name, inherited_environ())
    with operating(found) as operator:
        told = operator.status()
    facts = found.facts
    under = "keeper" if facts.is_detached else "launcher"
    lines = [
        f"job {facts.name} (id {facts.job_id}, {under} pid {facts.supervisor}): {facts.command}"
    ]
    lines += [f"coordinator {facts.coordinator}, secret file {facts.secret_file}"]
    if facts.log_dir:
        lines.append(f"output in {facts.log_dir}")
    _print([*lines, *describe(told)])
    return 0


def describe(told: Status) -> list[str]:
    """Write a job's status for people."""
    if told.over:
        return [f"over: {told.over}"]
    if told.membership is None:
        return [f"forming: waits for ranks {', '.join(map(str, told.missing))}"]
    policy = told.policy
    bounds = f"{policy.min_workers} to {policy.max_workers} workers, on loss {policy.on_loss}"
    if not policy.is_elastic:
        bounds = "not elastic: the first loss ends the job"
    lines = [f"generation {told.generation}; {bounds}"]
    for member in _by_place(told.membership.members):
        state = told.states.get(member.rank, "")
        if not state and member.rank in told.not_adopted:
            state = f"not yet in generation {told.generation}"
        where = f"rank {member.rank}, host {member.hostname}, pid {member.pid}"
        lines.append(f"  {member.role} {member.number} ({where}){': ' + state if state else ''}")
    lines += [f"  {place.role} {place.number} is on its way" for place in told.reserved]
    lines += [f"  {place.role} {place.number} is wanted" for place in told.wanted]
    if told.degraded:
        few = ", ".join(map(str, told.degraded))
        lines.append(f"partitions {few} have fewer than {policy.replicas} copies")
    return lines + (["finishing: who ends now is not replaced"] if told.is_finishing else [])


def servers(words: Sequence[str]) -> int:
    """Show the load of each server, or add or remove servers: [JOB] [add [N] | remove K ...]."""
    given = list(words)
    name = given.pop(0) if given and given[0] not in ("add", "remove") else None
    found = find_job(name, inherited_environ())
    with operating(found) as operator:
        _print(_servers_now(operator))
        if not given:
            return 0
        verb, numbers = given[0], _numbers(given)
        if verb == "add":
            operator.servers_add(numbers[0] if numbers else 1)
        elif verb == "remove" and numbers:
            operator.servers_remove(numbers)
        else:
            raise UsageError("write paceline servers [JOB], or with add [N], or with remove K ...")
        _print(["partitions move while training goes on; see `paceline servers` again"])
    return 0


def _servers_now(operator: Operator) -> list[str]:
    told = operator.status()
    return server_table(told, measured_loads(told))


def _numbers(words: Sequence[str]) -> list[int]:
    try:
        return [int(word) for word in words[1:]]
    except ValueError:
        raise UsageError(
            f"servers {' '.join(words)[:60]}: expected whole numbers, for example servers add 1"
        ) from None


def server_table(told: Status, loads: Mapping[int, float]) -> list[str]:
    """Write which server answers for which partitions, and its load: the part of a core it uses."""
    if told.membership is None or not told.membership.servers:
        return ["the job has no servers"]
    held = told.membership.holders
    asked = {load.rank: load for load in told.loads}
    lines = ["server  load  answers for           backup of" + ("  asked" if asked else "")]
    for member in _by_place(told.membership.members):
        if member.role != "server":
            continue
        primary = [p for p, ranks in enumerate(held) if ranks[:1] == (member.rank,)]
        backup = [p for p, ranks in enumerate(held) if member.rank in ranks[1:]]
        load = f"{100 * loads[member.rank]:.0f} %" if member.rank in loads else "-"
        line = f"{member.number:6} {load:>5}  {_list(primary):20}  {_list(backup)}"
        if member.rank in asked:
            rate = asked[member.rank]
            line = f"{line:48} {rate.requests_s:5.0f}/s, {rate.bytes_s / 1e6:.1f} MB/s"
        lines.append(line)
    return lines


def _list(partitions: Sequence[int]) -> str:
    return ",".join(map(str, partitions)) or "-"


def measured_loads(told: Status) -> dict[int, float]:
    """Measure for a second what part of a core each server of this host uses, by rank."""
    here = natural_host_id()
    members = told.membership.members if told.membership is not None else ()
    pids = {one.rank: one.pid for one in members if one.role == "server" and one.host_id == here}
    before = {rank: processor_s(pid) for rank, pid in pids.items()}
    if before:
        time.sleep(_MEASURE_S)
    after = {rank: processor_s(pid) for rank, pid in pids.items()}
    loads: dict[int, float] = {}
    for rank, first_s in before.items():
        last_s = after[rank]
        if first_s is not None and last_s is not None:
            loads[rank] = (last_s - first_s) / _MEASURE_S
    return loads


def scale(name: str | None, workers: int) -> int:
    """Have that many workers from now on."""
    found = find_job(name, inherited_environ())
    with operating(found) as operator:
        operator.scale(workers)
    _print([f"job {found.facts.name}: {workers} worker{'s' if workers != 1 else ''} from now on"])
    return 0


def set_pace(name: str | None, setting: str) -> int:
    """Change the pace of all workers behind one step: setting is "pace=..."."""
    what, equals, pace = setting.partition("=")
    if what.strip() != "pace" or not equals:
        raise UsageError(
            f"set {setting[:60]}: what can be set is the pace, for example `paceline set"
            " pace=local:8`"
        )
    wanted = str(parse_schedule(pace))
    found = find_job(name, inherited_environ())
    with operating(found) as operator:
        step = operator.set_pace(wanted)
    _print([f"job {found.facts.name}: pace {wanted} behind step {step}"])
    return 0


def stop(name: str | None) -> int:
    """End a job as SIGTERM to its launcher does, and wait for its end."""
    found = find_job(name, inherited_environ())
    facts = found.facts
    if not found.is_supervised:
        end_processes(facts.job_id, [one.pid for one in recorded(found.directory) if one.is_alive])
        remove_abandoned(found.directory)
        _print([f"job {facts.name} had no keeper; its processes were ended"])
        return 0
    os.kill(facts.supervisor, signal.SIGTERM)
    grace_s = max(facts.grace_s, SAVE_GRACE_S)  # its workers may save first
    deadline_s = time.monotonic() + grace_s + _AFTER_GRACE_S
    with suppress(OSError):  # the directory goes with the job
        while is_held(found.directory):
            if time.monotonic() > deadline_s:
                raise LaunchError(f"job {facts.name} has not ended; see process {facts.supervisor}")
            time.sleep(0.05)
    _print([f"job {facts.name} has ended"])
    return 0


def _by_place(members: Sequence[Member]) -> list[Member]:
    return sorted(members, key=lambda one: (one.role != "worker", one.number))


def _print(lines: Sequence[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


# -- join ---------------------------------------------------------------------------------------


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
