"""The Kubernetes engine: pods of the job, agents through the programs that wait in them (pod.py).

A pod may be pending, or its image may still be loading, so the engine dials until the pod answers.
A lost pod is replaced by Kubernetes under the same name, and is dialled again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from paceline.control.transport.auth import load_secret
from paceline.control.transport.sockets import join_address
from paceline.errors import AuthError, ConfigError, LaunchError, PacelineError, VersionMismatch
from paceline.launcher.engines.agent_command import AgentPlace
from paceline.launcher.engines.kubernetes import agent_relay as relay
from paceline.launcher.engines.kubernetes.heartbeat import beat
from paceline.launcher.engines.kubernetes.pods import JOB, PORT, SECRET_FILE
from paceline.launcher.hosts.host_list import HostSlots
from paceline.launcher.preemption.notice import Notice
from paceline.runtime.config import runtime_dir

PENDING_S = 1800.0  # for a pod to be placed and its image to be loaded
_DIAL_S = 5.0
_PAUSE_S = 0.2

_T = TypeVar("_T")


class KubernetesEngine:
    """Starts agents in the pods of the job that `environ` describes."""

    name = "kubernetes"
    pid: int | None = None  # it has no child
    replaces_early = False  # a pod is replaced when it is gone

    def __init__(
        self, hosts: Sequence[HostSlots], place: AgentPlace, environ: Mapping[str, str]
    ) -> None:
        # Never called: the agent of a pod gets the signal.
        self.on_notice: Callable[[str, Notice], None] = lambda _host, _notice: None
        self._hosts, self._place = list(hosts), place
        if not environ.get(JOB) or not environ.get(SECRET_FILE):
            raise ConfigError(f"{JOB} or {SECRET_FILE} is not set: this is no coordinator's pod")
        self._job = environ[JOB]
        self._secret = load_secret(environ[SECRET_FILE], is_mounted=True)
        self._returned: asyncio.Queue[HostSlots] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._start_task(beat(Path(runtime_dir(environ))))

    def hosts(self) -> list[HostSlots]:
        """Return the hosts with their slots, in the order of ranks."""
        return list(self._hosts)

    async def start_agent(self, host: HostSlots, invitation: bytes) -> relay.PodAgent:
        """Dial a pod until it answers, and start an agent there; see Engine."""
        address = join_address(host.name, PORT)
        channel = await self._keep_dialling(
            host, lambda: relay.dial(address, self._secret, self._job, relay.AGENT), PENDING_S
        )
        agent = relay.PodAgent(channel, self._place.stdin(invitation))
        self._start_task(self._await_return(host, agent))
        return agent

    async def _await_return(self, host: HostSlots, agent: relay.PodAgent) -> None:
        """If an agent is lost, wait until its pod, or the replacement of it, answers."""
        await agent.wait()
        if agent.is_leaving or not agent.is_closed:
            address = join_address(host.name, PORT)
            await self._keep_dialling(
                host, lambda: relay.look(address, self._secret, self._job), float("inf")
            )
            self._returned.put_nowait(host)

    # -- see SupplyingEngine -----------------------------------------------------------------

    async def acquire(self, log: Callable[[str], None]) -> list[HostSlots]:
        """Return the pods: Kubernetes has been asked for them, and start_agent waits for each."""
        del log
        return self.hosts()

    async def next_host(self) -> HostSlots:
        """Wait for a lost pod to return."""
        return await self._returned.get()

    def want(self, workers: int, servers: int, busy: Mapping[str, int]) -> None:
        """Do nothing: Kubernetes replaces lost pods, and the number of pods does not change."""

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep_dialling(
        self, host: HostSlots, dial: Callable[[], Awaitable[_T]], within_s: float
    ) -> _T:
        begun_s = time.monotonic()
        while True:
            try:
                return await asyncio.wait_for(dial(), _DIAL_S)
            except asyncio.TimeoutError:
                reason = "no answer"
            except (OSError, EOFError) as error:  # no name yet, nothing listens, or it is to end
                reason = getattr(error, "strerror", None) or str(error)
            except (AuthError, VersionMismatch) as error:
                raise LaunchError(str(error)) from error
            except PacelineError as error:  # it ended while we dialled
                reason = str(error)
            if time.monotonic() - begun_s > within_s:
                raise LaunchError(
                    f"pod {host.name} has not answered in {within_s / 60:.0f} minutes ({reason});"
                    f" `kubectl describe pod {host.name.partition('.')[0]}` shows why it is pending"
                )
            await asyncio.sleep(_PAUSE_S)

    def explain(self, host: HostSlots, exit_code: int, errors: str) -> str:
        """Return one sentence: why an agent ended, and what to do."""
        if exit_code == relay.LOST:
            return f"the connection to pod {host.name} broke; it was lost or replaced"
        return self._place.explain(host.name, exit_code, errors) or (
            f"the agent in pod {host.name} ended with exit code {exit_code}"
        )

    async def close(self) -> None:
        """Wait for no pod any more, and end the heartbeat: the launcher only has to end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
