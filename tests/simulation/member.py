"""What workers and servers have in common: a connection to the coordinator, which comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.control import messages as m
from paceline.control.member import Member, Membership
from paceline.control.membership.state import Reservation
from simulation.network import End
from simulation.process import Process

if TYPE_CHECKING:
    from simulation.job import SimJob

HEARTBEAT_S = 0.5
RETRY_S = 0.2
ACCUSE_S = 0.5


class SimMember(Process):
    """A worker or a server."""

    def __init__(self, job: SimJob, place: Reservation, host: str, *, is_newcomer: bool) -> None:
        name = f"{place.role} {place.number}"
        if is_newcomer:
            name += f" (rank {place.rank})"
        super().__init__(job.world, job.network, name, host)
        self.job, self.oracle = job, job.oracle
        self.rank, self.role, self.number = place.rank, place.role, place.number
        self.is_newcomer = is_newcomer
        self.dice = job.world.stream(name)
        self.membership: Membership | None = None  # the newest
        self.generation = 0  # of the newest
        self.adopted = 0  # the generation that it works in
        self._control: End | None = None
        self._is_leaving = False

    @property
    def me(self) -> Member:
        return Member(
            rank=self.rank,
            role=self.role,
            host_id=self.host,
            hostname=self.host,
            pid=self.rank + 1000,
            local_rank=0,
            unix=self.name,
            tcp="",
            number=self.number,
        )

    def on_start(self) -> None:
        self.network.connect(self, "coordinator", "control")
        self.after(HEARTBEAT_S, self._beat)

    def _beat(self) -> None:
        self.tell("heartbeat")
        self.after(HEARTBEAT_S, self._beat)

    def tell(self, *message: Any) -> None:
        """Say something to the coordinator, if it is there."""
        if self._control is not None:
            self._control.send(message)

    # -- connections --------------------------------------------------------------------------

    def on_open(self, end: End) -> None:
        if end.what == "control":
            self._control = end
            if self.membership is not None:
                self.tell("attach", self.rank, self.adopted, self.membership.generation)
                self.on_attached()
            else:
                self.tell("ready" if self.is_newcomer else "join", self.me)
        else:
            self.on_line(end)

    def on_end(self, end: End, why: str) -> None:
        if end.what == "control":
            self._control = None
            if not self._is_leaving:
                self.after(RETRY_S, self.network.connect, self, "coordinator", "control")
        else:
            self.on_line_end(end, why)

    def on_message(self, end: End, message: Any) -> None:
        if end.what != "control":
            self.on_line_message(end, message)
            return
        verb, *args = message
        if verb == "changed":
            self.on_changed(args[0])
            self._learn(args[0].membership)
        elif verb == "joined":
            self._learn(args[0])
        elif verb == "over":
            self.exit("the job is over")
        elif verb == "refused" and args[0] in ("Evicted", "RendezvousError"):
            self.exit(f"not wanted any more: {args[1]}")
        elif verb == "unwanted":
            self.on_unwanted()
        elif verb == "presence":
            self._on_presence(args[0])

    def _on_presence(self, presence: m.Presence) -> None:
        if presence.rank == self.rank:
            self.exit(f"taken for lost: {presence.detail}")
        else:
            self.on_presence(presence)

    def _learn(self, membership: Membership) -> None:
        if self.membership is not None and membership.generation <= self.membership.generation:
            return
        if self.rank not in membership.ranks:
            if self.membership is not None:
                self.exit(f"not in generation {membership.generation} any more")
            return
        if membership.generation == 1:
            self.adopted = 1  # there is nothing older to be done with
        self.membership, self.generation = membership, membership.generation
        self.on_membership(membership)

    def adopt(self) -> None:
        """Say that this member works in the newest generation."""
        assert self.membership is not None
        if self.membership.generation > self.adopted:
            self.adopted = self.membership.generation
            self.tell("entered", self.adopted)

    def accuse_later(self, rank: int, why: str) -> None:
        """Accuse another member, as long as it cannot be reached."""
        self.after(ACCUSE_S, self._accuse, rank, why)

    def _accuse(self, rank: int, why: str) -> None:
        assert self.membership is not None
        if rank in self.membership.ranks and self.is_broken(rank):
            self.world.say(self.name, "accuses rank {}: {}", rank, why)
            self.tell("report_unreachable", rank, why)
            if not self.job.cores.accuses_once:
                self.accuse_later(rank, why)

    def leave(self, *, is_finished: bool) -> None:
        """Go in good order."""
        self._is_leaving = True
        self.tell("leave", is_finished)
        self.oracle.left(self.rank)
        self.exit("left")

    def finish(self) -> None:
        """Go because the work is done, unless this member is gone already."""
        if self.is_alive:
            self.leave(is_finished=True)

    # -- for workers and servers --------------------------------------------------------------

    def on_membership(self, membership: Membership) -> None: ...
    def on_changed(self, changed: m.Changed) -> None: ...
    def on_attached(self) -> None: ...
    def on_unwanted(self) -> None: ...
    def on_presence(self, presence: m.Presence) -> None: ...
    def on_line(self, end: End) -> None: ...
    def on_line_end(self, end: End, why: str) -> None: ...
    def on_line_message(self, end: End, message: Any) -> None: ...
    def is_broken(self, rank: int) -> bool:
        """Whether another member still cannot be reached."""
        return False
