"""Carries out `paceline hosts`: lists the hosts of a running job, adds one, removes one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from paceline.control.operator_messages import HostsWanted
from paceline.errors import ConfigError, PacelineError
from paceline.launcher.elastic.departures import REMOVAL_S
from paceline.launcher.hosts.host_list import HostSlots, parse_hosts

if TYPE_CHECKING:
    from paceline.launcher.elastic.job import ElasticJob


class ChangingHosts(Protocol):
    """The hosts of a job. The methods return lines for people and raise PacelineError."""

    def host_lines(self) -> list[str]:
        """Return a line for each host."""

    async def add_host(self, host: HostSlots) -> str:
        """Connect to a host and let newcomers run there; return a line about it."""

    async def remove_host(self, name: str) -> str:
        """Let a host leave as planned; return a line about it."""


class NoHosts:
    """A job without a host list: it runs on the launcher's machine."""

    def host_lines(self) -> list[str]:
        return ["the job has no host list: all its processes run on the launcher's machine"]

    async def add_host(self, host: HostSlots) -> str:
        raise _no_hosts(f"add {host}")

    async def remove_host(self, name: str) -> str:
        raise _no_hosts(f"remove {name}")


class HostsOfJob:
    """The hosts of an elastic job."""

    def __init__(self, job: ElasticJob) -> None:
        self._job = job

    def host_lines(self) -> list[str]:
        lines = self._job.hosts.host_lines()
        states = [self._job.departures.state_of(line.partition(" ")[0]) for line in lines]
        return [f"{a}; {b}" if b else a for a, b in zip(lines, states, strict=True)]

    async def add_host(self, host: HostSlots) -> str:
        line = await self._job.hosts.add_host(host)
        self._job.log(line)
        return line

    async def remove_host(self, name: str) -> str:
        try:
            why = "`paceline hosts remove`"
            line = await self._job.departures.leave(name, why, REMOVAL_S)
        except ConfigError as error:
            raise ConfigError(f"hosts remove {name}: {error}") from None
        return line or f"host {name}: the job ends"


def _no_hosts(words: str) -> ConfigError:
    return ConfigError(
        f"hosts {words}: the job has no host list, all its processes run on the launcher's machine;"
        " start it with --hosts, for example --hosts a:4,b:4 --min 1"
    )


async def answer(job: ElasticJob, request: HostsWanted) -> None:
    """Carry out a request and answer it; fill open slots if there is another host."""
    hosts: ChangingHosts = NoHosts() if job.hosts.placement is None else HostsOfJob(job)
    try:
        if job.hosts.supply is not None and request.action != "list":
            raise ConfigError(
                f"hosts {request.action} {request.host}: {job.hosts.supply.name} chooses the hosts"
                " of this job; use `paceline scale`, or add and remove nodes of the cluster"
            )
        text = await carry_out(hosts, request)
    except PacelineError as error:
        job.control.answer_hosts(request.request, str(error), type(error).__name__)
        return
    job.control.answer_hosts(request.request, text)
    if request.action == "add":
        job.newcomers.forgive()
        for wanted in await job.control.wanted():
            job.on_wanted(wanted)


async def carry_out(hosts: ChangingHosts, request: HostsWanted) -> str:
    """Carry out a request; return what to answer."""
    if request.action == "add":
        return await hosts.add_host(one_host(request.host))
    if request.action == "remove":
        return await hosts.remove_host(request.host)
    return "\n".join(hosts.host_lines())


def one_host(text: str) -> HostSlots:
    """Read the host of `paceline hosts add`; raises ConfigError."""
    hosts = parse_hosts(text, "hosts add")
    if len(hosts) > 1:
        raise ConfigError(f"hosts add {text[:60]}: add one host at a time, for example `add c:4`")
    return hosts[0]
