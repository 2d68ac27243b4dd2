"""A story on several hosts, which are network namespaces: cables can be cut between them.

The coordinator runs in the test itself, on a host called "here"; every other process is put into
the namespace of its host before it joins. What the launcher would print is made from the news of
the coordinator, so that stories read the same.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import story_diary
from story import Story
from story_job import START_S, Line
from story_wires import Wires

from paceline.control import messages as m
from paceline.control.client.operator import Operator
from paceline.control.membership.policy import Policy
from paceline.control.transport.auth import load_secret
from support.elastic import ElasticJob

_CLONE_NEWNET = 0x40000000


def on_host(namespace: str, role: str, argv: Sequence[str]) -> None:
    """Enter a host; then train, or serve."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    if role == "server":
        from paceline.runtime import server_main as serve

        sys.exit(serve.main())
    import story_script

    sys.argv = ["story_script.py", *argv]
    story_script.main()


class _Job(ElasticJob):
    """The processes of the story, each on its host."""

    def __init__(self, net: Wires, places: Sequence[str], argv: Sequence[str], **more: Any) -> None:
        self._net, self._places, self._argv = net, list(places), list(argv)
        super().__init__(on_event=None, env={}, bind=net.address("here"), **more)
        secret = load_secret(self._secret_file)
        self.news: list[tuple[float, object]] = []
        self._watch = Operator.connect(
            self._address,
            secret,
            self._job_id,
            on_notification=lambda news: self.news.append((time.monotonic(), news)),
        )

    def _start(self, what: tuple[Any, Any], env: Mapping[str, str]) -> None:
        del what
        host = self._places[len(self.processes)]
        place = {"PACELINE_HOST_ID": host, "PACELINE_BIND": self._net.address(host)}
        arguments = (self._net.namespace(host), env.get("PACELINE_ROLE", "worker"), self._argv)
        super()._start((on_host, arguments), {**env, **place})

    def begin(self) -> None:
        self.start(on_host)  # replaced in _start

    def join(self, host: str) -> int:
        self._places.append(host)
        return self.add()

    def close(self) -> None:
        self._watch.close()
        super().close()


class HostsStory(Story):
    """The same words as for a job on one host, and `net` for what happens to the wires."""

    def __init__(self, directory: Path, net: Wires) -> None:
        super().__init__(directory)
        self.net = net
        self._job: _Job | None = None

    def start_on(
        self,
        workers: Sequence[str],
        servers: Sequence[str] = (),
        replicas: int = 1,
        **arguments: Any,
    ) -> None:
        words = [w for k, v in arguments.items() for w in (f"--{k}", str(v))]
        policy = Policy(
            num_workers=len(workers),
            num_servers=len(servers),
            num_partitions=2 * len(servers),
            replicas=replicas,
            is_elastic=True,
            min_workers=1,
            max_workers=len(workers) + 2,
            max_servers=2 * len(servers),
        )
        self._job = _Job(
            self.net,
            [*workers, *servers],
            [*words, "--diary", str(self.diaries)],
            policy=policy,
            directory=str(self.runtime),
        )
        self._job.begin()

    def join(self, host: str) -> int:
        """Start one more worker on that host."""
        assert self._job is not None
        return self._job.join(host)

    def pid(self, who: str) -> int:
        role, _, number = who.partition(" ")
        assert self._job is not None
        first = 0 if role == "worker" else self._job.policy.num_workers
        return self._job.ranks.pids[first + int(number)]

    def workers_of(self, *numbers: int) -> list[story_diary.Worker]:
        return [worker for worker in self.workers() if worker.number in numbers]

    def expect_survivors_to_finish(self, *ranks: int, within_s: float = START_S) -> None:
        """Expect that these workers finish; the others may have ended in any way."""
        assert self._job is not None
        self.finish()
        for outcome in self._job.ranks.wait(within_s, list(ranks)):
            assert outcome.status == 0, f"{outcome}{self}"

    def expect_agreement_of(self, *numbers: int) -> None:
        """Expect the same of some. One that was cut off may have had all it needed for the step
        under way when the others had not: what it made of that is nobody's but its own."""
        story_diary.require_agreement(self.workers_of(*numbers))

    def expect_no_commit_of(self, number: int, since_s: float) -> None:
        """Expect that a worker has counted no step since then."""
        for worker in self.workers_of(number):
            late = [step for step in worker.steps if step.at_s > since_s]
            assert not late, f"worker {number} went on: {late}{self}"

    @property
    def lines(self) -> list[Line]:  # type: ignore[override]
        if self._job is None:
            return []
        return [Line(at_s, text) for at_s, news in list(self._job.news) for text in _words(news)]

    @lines.setter
    def lines(self, value: list[Line]) -> None:
        del value

    def close(self) -> None:
        if self._job is not None:
            self._job.close()

    def __str__(self) -> str:
        job = self._job
        outputs = (
            []
            if job is None
            else [
                f"\n  rank {r}:\n{job.ranks.output(r)[-3000:]}" for r in range(len(job.processes))
            ]
        )
        return super().__str__() + "".join(outputs)


def _words(news: object) -> list[str]:
    if isinstance(news, m.Changed):
        told = [f"{loss.role} {loss.number} ({loss.where}) lost: {loss.why}" for loss in news.lost]
        joined = [news.membership.member(rank) for rank in news.joined]
        return told + [f"{one.role} {one.number} ({one.where}) joined" for one in joined]
    if isinstance(news, m.Over):
        return [f"over: {news.why}"]
    if isinstance(news, m.Presence):
        return [f"rank {news.rank} is {news.state}: {news.detail}"]
    return []
