"""The launcher's connection to the job's coordinator: its process, and what is said to it.

The operator (cluster/operator.py) has a thread of its own and methods that block; here they become
coroutines of the launcher's loop, and news arrive in it.

Threads: used in the launcher's loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from paceline.cluster.decisions import Place
from paceline.cluster.messages import LossKind
from paceline.cluster.operator import News, Operator, Status
from paceline.cluster.policy import Policy
from paceline.config import EngineConfig
from paceline.launcher.elastic.coordination import Coordination
from paceline.launcher.elastic.plan import ElasticPlan
from paceline.launcher.spec import RunSpec
from paceline.mesh import Mesh

_START_S = 30.0  # for the coordinator's first answer, on a machine that is busy starting ranks


def policy_of(
    spec: RunSpec, plan: ElasticPlan, config: EngineConfig, mesh: Mesh | None = None
) -> Policy:
    """Return what was asked for in the coordinator's words."""
    return Policy(
        num_workers=spec.num_workers,
        num_servers=spec.num_servers,
        is_elastic=True,
        min_workers=plan.min_workers,
        max_workers=plan.max_workers,
        max_servers=plan.max_servers,
        on_loss=plan.on_loss,
        replicas=spec.servers.replicas,
        num_partitions=plan.num_partitions(spec.servers),
        mesh=str(mesh or ""),
        lease_s=config.lease_s,
    )


class Control:
    """The coordinator, from its start to its end."""

    def __init__(
        self,
        coordination: Coordination,
        secret: bytes,
        job_id: str,
        on_news: Callable[[News], None],
    ) -> None:
        self._coordination = coordination
        self._secret, self._job_id, self._on_news = secret, job_id, on_news
        self._operator: Operator | None = None

    @property
    def pid(self) -> int | None:
        return self._coordination.pid

    async def attach(self) -> Status:
        """Begin to listen; return how the job is. News come from now on."""
        loop = asyncio.get_running_loop()

        def pass_on(news: News) -> None:
            loop.call_soon_threadsafe(self._on_news, news)

        self._operator = await asyncio.to_thread(
            Operator.connect,
            self._coordination.address,
            self._secret,
            self._job_id,
            timeout_s=_START_S,
            on_news=pass_on,
            is_launcher=True,
        )
        return await self.status()

    def look(self) -> None:
        """Start the coordinator again if it has ended; LaunchError when it keeps ending."""
        self._coordination.look()

    async def status(self) -> Status:
        assert self._operator is not None
        return await asyncio.to_thread(self._operator.status)

    async def reserve(self, role: str, number: int) -> Place:
        assert self._operator is not None
        return await asyncio.to_thread(self._operator.reserve, role, number)

    def report_end(self, rank: int, text: str, kind: LossKind | None) -> None:
        if self._operator is not None:
            self._operator.report_end(rank, text, kind)

    def report_seen(self, rank: int, stopped_for_s: float | None) -> None:
        """Tell whether a process runs (None), or for how long it has been stopped."""
        if self._operator is None:
            return
        if stopped_for_s is None:
            self._operator.report_running(rank)
        else:
            self._operator.report_stopped(rank, stopped_for_s)

    async def close(self) -> None:
        """End the connection and the coordinator."""
        if self._operator is not None:
            await asyncio.to_thread(self._operator.close)
        self._coordination.end()
