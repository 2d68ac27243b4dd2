"""Commands for a running job: status, scale, servers, set, stop, join.

The registry (launcher/job_registry.py) finds a job of this user on this host by its name; then the
coordinator of the job answers, or refuses with an error of its own.

`join` reserves a rank at the coordinator and then becomes the script (exec), with the environment
of a newcomer. On another host it needs the coordinator's address and a copy of the secret file.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.control.client.operator import Operator
from paceline.control.member import Member
from paceline.control.membership.policy import Policy
from paceline.control.operator_messages import Notification, Status
from paceline.control.transport.auth import load_secret
from paceline.errors import LaunchError, UsageError
from paceline.launcher.environment import JobAddresses, process_environ
from paceline.launcher.job_directory import is_held, remove_abandoned
from paceline.launcher.job_registry import FoundJob, find_job, jobs, recorded_processes
from paceline.launcher.job_size import ElasticPlan, ServerPlan
from paceline.launcher.processes.guard_main import end_processes
from paceline.launcher.spec import SAVE_GRACE_S, RunSpec
from paceline.pace.parse import Schedule, parse_schedule
from paceline.runtime.config import inherited_environ, natural_host_id, set_encryption
from paceline.runtime.console import say
from paceline.runtime.machine import processor_s, usable_cores
from paceline.runtime.mesh import Mesh
from paceline.runtime.process_names import ProcessName

_MEASURE_S = 1.0
_AFTER_GRACE_S = 10.0  # after the grace period of the job: for its end


@contextmanager
def operating(
    found: FoundJob, on_notification: Callable[[Notification], None] | None = None
) -> Iterator[Operator]:
    """Connect to a job's coordinator; another thread calls `on_notification` with its news."""
    facts = found.facts
    if not found.is_supervised:
        raise LaunchError(
            f"job {facts.name} runs, but its supervisor and coordinator are gone;"
            f" `paceline attach {facts.name}` starts them again"
        )
    set_encryption(facts.encryption)
    secret = load_secret(facts.secret_file)
    operator = Operator.connect(
        facts.coordinator, secret, facts.job_id, on_notification=on_notification
    )
    try:
        yield operator
    finally:
        operator.close()


def status(name: str | None) -> int:
    """Print the members of a job, its newcomers, and where its tables are."""
    found = find_job(name, inherited_environ())
    with operating(found) as operator:
        current = operator.status()
    facts = found.facts
    by = f"{'supervisor' if facts.is_detached else 'launcher'} pid {facts.supervisor}"
    lines = [f"job {facts.name} (id {facts.job_id}, {by}): {facts.command}"]
    lines += [f"coordinator {facts.coordinator}, secret file {facts.secret_file}"]
    if facts.log_dir:
        lines.append(f"output in {facts.log_dir}")
    _print([*lines, *describe(current)])
    return 0


def describe(current: Status) -> list[str]:
    """Return a job's status as lines for people."""
    if current.over:
        return [f"over: {current.over}"]
    if current.membership is None:
        return [f"forming: waiting for ranks {', '.join(map(str, current.missing))}"]
    policy = current.policy
    bounds = f"{policy.min_workers} to {policy.max_workers} workers, on loss {policy.on_loss}"
    if not policy.is_elastic:
        bounds = "not elastic: the first loss ends the job"
    lines = [f"generation {current.generation}; {bounds}"]
    for member in _by_role(current.membership.members):
        state = current.states.get(member.rank, "")
        if not state and member.rank in current.leaving:
            state = "leaving: its host goes away"
        if not state and member.rank in current.not_adopted:
            state = f"not yet in generation {current.generation}"
        where = f"rank {member.rank}, host {member.hostname}, pid {member.pid}"
        lines.append(f"  {member.role} {member.number} ({where}){': ' + state if state else ''}")
    lines += [f"  {place.role} {place.number} is on its way" for place in current.reserved]
    lines += [f"  {place.role} {place.number} is wanted" for place in current.wanted]
    if current.degraded:
        few = ", ".join(map(str, current.degraded))
        lines.append(f"partitions {few} have fewer than {policy.replicas} copies")
    return lines + (
        ["finishing: processes that end now are not replaced"] if current.is_finishing else []
    )


def servers(words: Sequence[str]) -> int:
    """Print the load of each server, or add or remove servers: [JOB] [add [N] | remove K ...]."""
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
        _print(["partitions move while training continues; run `paceline servers` again to see it"])
    return 0


def _servers_now(operator: Operator) -> list[str]:
    current = operator.status()
    return server_table(current, measured_loads(current))


def _numbers(words: Sequence[str]) -> list[int]:
    try:
        return [int(word) for word in words[1:]]
    except ValueError:
        raise UsageError(
            f"servers {' '.join(words)[:60]}: expected whole numbers, for example servers add 1"
        ) from None


def server_table(current: Status, loads: Mapping[int, float]) -> list[str]:
    """Return a table of the servers: load (share of a core), primary and backup partitions."""
    if current.membership is None or not current.membership.servers:
        return ["the job has no servers"]
    held = current.membership.holders
    asked = {load.rank: load for load in current.loads}
    lines = ["server  load  answers for           backup of" + ("  asked" if asked else "")]
    for member in _by_role(current.membership.members):
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


def measured_loads(current: Status) -> dict[int, float]:
    """Measure for a second which share of a core each server of this host uses, by rank."""
    here = natural_host_id()
    members = current.membership.members if current.membership is not None else ()
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
    """Change the number of workers."""
    found = find_job(name, inherited_environ())
    with operating(found) as operator:
        operator.scale(workers)
    _print([f"job {found.facts.name}: {workers} worker{'s' if workers != 1 else ''} from now on"])
    return 0


def set_pace(name: str | None, setting: str) -> int:
    """Change the pace of all workers after the same step; the setting is "pace=..."."""
    what, equals, pace = setting.partition("=")
    if what.strip() != "pace" or not equals:
        raise UsageError(
            f"set {setting[:60]}: only the pace can be set, for example `paceline set pace=local:8`"
        )
    wanted = str(parse_schedule(pace))
    found = find_job(name, inherited_environ())
    with operating(found) as operator:
        step = operator.set_pace(wanted)
    _print([f"job {found.facts.name}: pace {wanted} after step {step}"])
    return 0


def stop(name: str | None) -> int:
    """Ask the launcher of a job to stop, and wait for the end of the job."""
    found = find_job(name, inherited_environ())
    facts = found.facts
    if not found.is_supervised:
        end_processes(
            facts.job_id, [one.pid for one in recorded_processes(found.directory) if one.is_alive]
        )
        remove_abandoned(found.directory)
        _print([f"job {facts.name} had no supervisor; its processes were ended"])
        return 0
    try:
        os.kill(facts.supervisor, facts.stop_signal)
    except ProcessLookupError:
        raise LaunchError(
            f"job {facts.name}: process {facts.supervisor} is not in this container; stop the job"
            f" on host {facts.host}"
        ) from None
    grace_s = max(facts.grace_s, SAVE_GRACE_S)  # its workers may save a checkpoint first
    deadline_s = time.monotonic() + grace_s + _AFTER_GRACE_S
    with suppress(OSError):  # the directory is removed with the job
        while is_held(found.directory):
            if time.monotonic() > deadline_s:
                raise LaunchError(
                    f"job {facts.name} has not ended; check process {facts.supervisor}"
                )
            time.sleep(0.05)
    _print([f"job {facts.name} has ended"])
    return 0


def _by_role(members: Sequence[Member]) -> list[Member]:
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
    """Become a worker of a running job; does not return unless it fails."""
    environ = inherited_environ()
    where, words, variables = _find(words, coordinator, secret_file)
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
        variables.pop("PACELINE_PACE", None)
    environ.update({variable: text for variable, text in variables.items() if text})
    name = ProcessName(place.rank, place.number, is_newcomer=True)
    environ = process_environ(environ, spec, name, where, cores=usable_cores())
    say(f"joining job {where.job_id} as worker {place.number}")
    argv = spec.command(name).argv
    os.execve(argv[0], argv, environ)


def _find(
    words: list[str], coordinator: str | None, secret_file: Path | None
) -> tuple[JobAddresses, list[str], dict[str, str]]:
    """Return the job, the words after its name, and variables of its settings.

    The first word is the name of the job; it may be left out if only one job runs.
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
    set_encryption(facts.encryption)
    variables = {
        "PACELINE_PACE": facts.pace,
        "PACELINE_PRECISION": facts.precision,
        "PACELINE_MAX_WIRE": facts.max_wire,
        "PACELINE_ENCRYPT": facts.encryption,
    }
    return where, words[1:] if name else words, variables


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
