"""Carries out `paceline hosts`: lists the hosts of a running job, adds one, removes one."""

from __future__ import annotations

from typing import Protocol

from paceline.control.operator_messages import HostsWanted
from paceline.errors import ConfigError, PacelineError
from paceline.launcher.elastic.coordinator_process import CoordinatorProcess
from paceline.launcher.hosts.host_list import HostSlots, parse_hosts
from paceline.launcher.hosts.placement import Placement


class ChangingHosts(Protocol):
    """The hosts of a job. The methods return lines for people and raise PacelineError."""

    def host_lines(self) -> list[str]:
        """Return a line for each host."""

    async def add_host(self, host: HostSlots) -> str:
        """Connect to a host and let newcomers run there; return a line about it."""

    async def remove_host(self, name: str) -> str:
        """End the processes of a host, which are replaced elsewhere; return a line about it."""


class FixedHosts:
    """Hosts that can be listed, but not changed; `placement` None: the job has no host list."""

    def __init__(self, placement: Placement | None) -> None:
        self._placement = placement

    def host_lines(self) -> list[str]:
        if self._placement is None:
            return ["the job has no host list: all its processes run on the launcher's machine"]
        return self._placement.lines()

    async def add_host(self, host: HostSlots) -> str:
        raise self._refuse(f"add {host}")

    async def remove_host(self, name: str) -> str:
        raise self._refuse(f"remove {name}")

    def _refuse(self, words: str) -> ConfigError:
        if self._placement is None:
            return ConfigError(
                f"hosts {words}: the job has no host list, all its processes run on the launcher's"
                " machine; start it with --hosts, for example --hosts a:4,b:4 --min 1"
            )
        return ConfigError(
            f"hosts {words}: this version cannot change the hosts of a running job; start the job"
            " with all hosts that it may need: newcomers use free slots"
        )


async def answer(hosts: ChangingHosts, request: HostsWanted, control: CoordinatorProcess) -> None:
    """Carry out a request and answer it."""
    try:
        text = await _carry_out(hosts, request)
    except PacelineError as error:
        control.answer_hosts(request.request, str(error), type(error).__name__)
    else:
        control.answer_hosts(request.request, text)


async def _carry_out(hosts: ChangingHosts, request: HostsWanted) -> str:
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
