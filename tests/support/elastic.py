"""An elastic job as tests start it: a coordinator in this process, workers that come and go."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.control.client.operator import Operator
from paceline.control.client.rendezvous import CoordinatorThread
from paceline.control.coordinator.coordinator import Coordinator
from paceline.control.membership.policy import Policy
from paceline.control.membership.state import Reservation
from paceline.control.transport.auth import create_secret_file, load_secret
from paceline.errors import RendezvousError
from paceline.observe.telemetry.events import Event
from support.body import pack
from support.environs import base_environ, encrypting_as
from support.ranks import ForkServer, Rank, Ranks, _serve, _unpack_and_join

# No launcher is there to say that a silent process runs: a machine that starves it for some seconds
# must not make it a lost one. Killed ones are noticed by their connections, at once.
_LEASE_S = 20.0


def pause_if_held(steps_done: int) -> None:
    """In a worker: wait as long as the test holds everybody behind this step, or one before."""
    path = Path(os.environ["TMPDIR"], "held")
    with contextlib.suppress(FileNotFoundError):  # nobody is held
        while steps_done >= int(path.read_text()):
            time.sleep(0.002)


class ElasticJob:
    """Processes are known by their rank, in the order in which they were started."""

    def __init__(
        self,
        policy: Policy,
        directory: str,
        env: Mapping[str, str],
        on_event: Any,
        bind: str = "127.0.0.1",
    ) -> None:
        self.policy = policy
        self.hosts: Sequence[int] = ()  # of each rank; nothing: one host
        self.events: list[Event] = []
        # What a worker calls to join and run a body, and its first arguments.
        self.joining: tuple[Callable[..., Any], tuple[Any, ...]] = (_unpack_and_join, ())
        self._directory, self._env = directory, dict(env)
        self._secret_file = create_secret_file(Path(directory))
        self._job_id = f"test-{os.path.basename(directory)}"
        secret = load_secret(self._secret_file)

        def note(event: Event) -> None:
            self.events.append(event)
            if on_event is not None:
                on_event(event)

        with encrypting_as(env):
            self.coordinator = CoordinatorThread(
                Coordinator(
                    self._job_id,
                    secret,
                    policy.num_workers + policy.num_servers,
                    30.0,
                    note,
                    policy=policy,
                )
            )
            self._address = self.coordinator.start(bind)
            self.operator = Operator.connect(self._address, secret, self._job_id)
        self.processes: list[Rank] = []
        self.ranks = Ranks([])

    def start(self, body: Callable[..., Any], *arguments: Any) -> None:
        """Start the job's first processes."""
        join, before = self.joining
        self._body = (join, (*before, pack(body), arguments))
        for number in range(self.policy.num_workers):
            self._start(self._body, {"PACELINE_RANK": str(number)})
        for number in range(self.policy.num_servers):
            self._start((_serve, ()), {"PACELINE_RANK": str(number), "PACELINE_ROLE": "server"})

    def add(self, role: str = "worker", number: int | None = None) -> int:
        """Start a newcomer; return its rank."""
        place = self._reserve(role, number)
        env = {
            "PACELINE_JOINS": "1",
            "PACELINE_RANK": str(place.rank),
            "PACELINE_NUMBER": str(place.number),
            "PACELINE_ROLE": role,
        }
        self._start(self._body if role == "worker" else (_serve, ()), env)
        assert len(self.processes) == place.rank + 1, "ranks are given out in order"
        return place.rank

    def hold_behind(self, step: int) -> None:
        """Let no worker go beyond that step, for bodies that call `pause_if_held`."""
        draft = Path(self._directory, "held-draft")
        draft.write_text(str(step))
        draft.rename(Path(self._directory, "held"))

    def let_go(self) -> None:
        """Let the workers go on to their end."""
        Path(self._directory, "held").unlink()

    def wait_for_member(self, rank: int, within_s: float = 60.0) -> None:
        """Wait until the coordinator has let a newcomer in, whatever the others are doing."""
        deadline_s = time.monotonic() + within_s
        while True:
            membership = self.operator.status().membership
            if membership is not None and rank in membership.ranks:
                return
            assert time.monotonic() < deadline_s, f"rank {rank} has not come in"
            time.sleep(0.02)

    def _reserve(self, role: str, number: int | None) -> Reservation:
        """Reserve a place; whoever had it may just have been killed, which is noticed soon."""
        deadline_s = time.monotonic() + 60
        while True:
            try:
                return self.operator.reserve(role, number)
            except RendezvousError:  # noqa: PERF203  # each turn waits
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.01)

    def _start(self, what: tuple[Any, Any], env: Mapping[str, str]) -> None:
        policy = self.policy
        place = len(self.processes)
        host = {"PACELINE_HOST_ID": f"h{self.hosts[place]}"} if self.hosts else {}
        environ = {
            **base_environ(self._directory),
            "PACELINE_COORDINATOR": self._address,
            "PACELINE_JOB": self._job_id,
            "PACELINE_SECRET_FILE": str(self._secret_file),
            "PACELINE_WORLD_SIZE": str(policy.num_workers),
            "PACELINE_ELASTIC": "1",
            "PACELINE_ON_LOSS": policy.on_loss,
            "PACELINE_REPLICAS": str(policy.replicas),
            **(
                {
                    "PACELINE_SERVERS": str(policy.num_servers),
                    "PACELINE_PARTITIONS": str(policy.partitions),
                }
                if policy.num_servers
                else {}
            ),
            **env,
            **host,
            **self._env,
        }
        self.processes.append(ForkServer.get().start(*what, environ))
        self.ranks.add(self.processes[-1])

    def close(self) -> None:
        self.ranks.close()
        self.operator.close()
        self.coordinator.stop()


@contextlib.contextmanager
def elastic_job(
    policy: Policy, env: Mapping[str, str] | None = None, on_event: Any = None
) -> Iterator[ElasticJob]:
    """Run a coordinator; yield a job to start processes in. Nothing survives the block."""
    if policy.lease_s == Policy(num_workers=1).lease_s:
        policy = msgspec.structs.replace(policy, lease_s=_LEASE_S)
    with tempfile.TemporaryDirectory(prefix=f"paceline-test-{os.getpid()}-") as directory:
        job = ElasticJob(policy, directory, env or {}, on_event)
        try:
            yield job
        finally:
            job.close()
