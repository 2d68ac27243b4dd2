"""A simulated launcher: starts processes, looks at those of its host, and passes wishes on.

It is the only one that never fails here. On its own host it sees processes end and whether they are
stopped, and ends those that the job goes on without; of other hosts it knows nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.control import messages as m
from paceline.control.membership.state import Reservation
from simulation.network import End
from simulation.process import Process

if TYPE_CHECKING:
    from simulation.job import SimJob
    from simulation.member import SimMember

LOOK_S = 0.5
RETRY_S = 0.1


class Launcher(Process):
    """Starts the members of a job, and whoever is wanted later."""

    def __init__(self, job: SimJob) -> None:
        super().__init__(job.world, job.network, "launcher", "home")
        self.job = job
        self.dice = job.world.stream("launcher")
        self._control: End | None = None
        self._stopped_s: dict[int, float] = {}
        self._wishes: list[tuple[Any, ...]] = []  # for when the coordinator is there
        self._exits: dict[int, str] = {}
        self._asked: set[tuple[str, int]] = set()
        self._starting: set[tuple[str, int]] = set()

    def on_start(self) -> None:
        self.job.coordinator.on_exit = self._on_coordinator_exit
        self.job.coordinator.start()
        policy = self.job.policy
        for rank in range(policy.num_workers + policy.num_servers):
            is_worker = rank < policy.num_workers
            number = rank if is_worker else rank - policy.num_workers
            place = Reservation(rank, "worker" if is_worker else "server", number)
            self._start(place, is_newcomer=False)
        self.network.connect(self, "coordinator", "launcher")
        self.after(LOOK_S, self._look)

    def _start(self, place: Reservation, *, is_newcomer: bool) -> None:
        member = self.job.make_member(place, is_newcomer=is_newcomer)
        member.on_exit = self._on_exit
        self.after(self.dice.uniform(0.05, 0.3), member.start)

    # -- its children -------------------------------------------------------------------------

    def _on_coordinator_exit(self, process: Process, why: str) -> None:
        self.after(self.dice.uniform(0.1, 1.5), process.start)

    def _on_exit(self, process: Process, why: str) -> None:
        member: SimMember = process  # type: ignore[assignment]
        if why == "left" or process.host != self.host:
            return  # of other hosts it learns nothing
        self._exits[member.rank] = why
        self.after(self.dice.uniform(0.001, 0.02), self._tell_exits)

    def _tell_exits(self) -> None:
        if self._control is not None:
            for rank, why in self._exits.items():
                self._control.send(("exited", rank, why))
            self._exits.clear()

    def _look(self) -> None:
        for member in self.job.living():
            if member.host != self.host:
                continue
            if member.state == "stopped":
                since_s = self._stopped_s.setdefault(member.rank, self.world.now_s)
            else:
                self._stopped_s.pop(member.rank, None)
                since_s = self.world.now_s
            stopped = self.world.now_s - since_s if member.state == "stopped" else None
            if self._control is not None:
                self._control.send(("seen", member.rank, stopped))
        self.after(LOOK_S, self._look)

    # -- the coordinator ----------------------------------------------------------------------

    def on_open(self, end: End) -> None:
        self._control = end
        self._asked.clear()
        end.send(("launcher",))
        self._tell_exits()
        wishes, self._wishes = self._wishes, []
        for wish in wishes:
            end.send(wish)

    def on_end(self, end: End, why: str) -> None:
        self._control = None
        self.after(RETRY_S, self.network.connect, self, "coordinator", "launcher")

    def on_message(self, end: End, message: Any) -> None:
        verb, *args = message
        if verb == "wanted":
            self._on_wanted(*args)
        elif verb == "reserved":
            (place,) = args
            self._asked.discard((place.role, place.number))
            self._start(place, is_newcomer=True)
        elif verb == "changed":
            self._end_lost(args[0])

    def _on_wanted(self, role: str, number: int) -> None:
        if (role, number) not in self._asked and self._control is not None:
            self._asked.add((role, number))
            self._control.send(("reserve", role, number))

    def plan_leave(self, host: str, *, waits: bool) -> None:
        """Let all members on a host leave."""
        here = [member for member in self.job.living() if member.host == host]
        self._pass_on(("plan_leave", [member.rank for member in here], waits))

    def withdraw_leave(self, ranks: list[int]) -> None:
        """Let those stay that have not left yet."""
        self._pass_on(("withdraw_leave", ranks))

    def _end_lost(self, changed: m.Changed) -> None:
        """End those of this host that the job goes on without."""
        for loss in changed.lost:
            member = self.job.by_rank[loss.rank]
            if member.is_alive and member.host == self.host:
                member.crash("ended by the launcher: it was taken for lost")

    def wish(self, what: str, pick: float) -> None:
        """Pass on what a person asks for."""
        policy = self.job.policy
        message: tuple[Any, ...]
        if what == "scale":
            size = policy.unit_size
            span = (policy.max_workers - policy.min_workers) // size + 1
            message = ("wish", "scale", policy.min_workers + size * int(pick * span))
        elif what == "add server":
            message = ("wish", "add_servers", 1)
        else:
            message = ("wish", "remove_servers", [int(pick * policy.num_servers)])
        self._pass_on(message)

    def _pass_on(self, message: tuple[Any, ...]) -> None:
        self.world.say(self.name, "passes on: {}", message)
        if self._control is not None:
            self._control.send(message)
        else:
            self._wishes.append(message)
