"""Kills processes of a running job at random: workers, servers and the coordinator.

Exception: the only process with the state of the training is not killed. That is the last worker of
an all-reduce job (or the last one that has done a step, if the others have just joined), or the
only copy of a partition. After its loss a job can only resume from a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

from paceline.control.client.operator import Operator
from paceline.control.member import Member
from paceline.control.transport.auth import load_secret
from paceline.errors import PacelineError


class Killer:
    """Chooses among the processes that are members at the moment.

    Workers and servers are equally likely; the coordinator is `weight` times as likely as one.
    """

    def __init__(
        self, diary: Path, seed: int, roles: tuple[str, ...], coordinator: int, weight: float = 1.0
    ) -> None:
        address, secret_file, job_id = json.loads((diary / "job.json").read_text())
        self._operator = Operator.connect(address, load_secret(secret_file), job_id)
        self._chance = random.Random(seed)
        self._roles, self._weight = roles, weight
        self._launcher, self._diary = coordinator, diary
        self.kills: list[tuple[float, str, int, int]] = []  # when, role, number, pid

    @property
    def by_role(self) -> Counter[str]:
        """How many of each role were killed."""
        return Counter(role for _, role, _, _ in self.kills)

    def pause(self, mean_s: float) -> float:
        """Return how long to wait for the next kill."""
        return self._chance.expovariate(1 / mean_s)

    def kill(self) -> bool:
        """Kill one process; false when the job could not be asked (its coordinator is away)."""
        try:
            membership = self._operator.status(timeout_s=2.0).membership
        except PacelineError:
            return False
        if membership is None:
            return False
        alive = {m.rank for m in membership.members if self._is_alive(m.pid)}
        holders = [alive.intersection(ranks) for ranks in membership.partitions]
        needed = {rank for ranks in holders if len(ranks) == 1 for rank in ranks}
        trained = [m.rank for m in membership.members if m.role == "worker" and self._has_state(m)]
        if len(trained) == 1:
            needed.update(trained)
        targets = [
            (m.role, m.number, m.pid)
            for m in membership.members
            if m.role in self._roles and m.rank in alive - needed
        ]
        if "coordinator" in self._roles:
            targets += [("coordinator", 0, pid) for pid in _coordinators(self._launcher)]
        weights = [self._weight if role == "coordinator" else 1.0 for role, _, _ in targets]
        if not any(weights):
            return False
        ((role, number, pid),) = self._chance.choices(targets, weights)
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(pid, signal.SIGKILL)
            self.kills.append((time.time(), role, number, pid))
        return True

    def _is_alive(self, pid: int) -> bool:
        """Return whether a member is alive; the job may not have noticed a kill yet."""
        if any(pid == killed for *_, killed in self.kills):
            return False
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        return False

    def _has_state(self, member: Member) -> bool:
        """Return whether a worker has done a step and is alive."""
        with contextlib.suppress(OSError):
            noted = (self._diary / f"{member.pid}.txt").read_text()
            return self._is_alive(member.pid) and " step " in noted
        return False

    def close(self) -> None:
        self._operator.close()


def _coordinators(launcher: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{launcher}/task").glob("*/children"):
        for pid in map(int, task.read_text().split()):
            with contextlib.suppress(OSError):
                if (
                    b"paceline.runtime.coordinator_main"
                    in Path(f"/proc/{pid}/cmdline").read_bytes()
                ):
                    found.append(pid)
    return found
