"""A roster in which everybody behaves, and time moves only when told: for tests of it."""

from __future__ import annotations

from paceline.control.member import Member
from paceline.control.membership.policy import Policy
from paceline.control.membership.roster import Roster
from paceline.control.messages import Changed


def member(rank, role="worker", number=None, host="h"):
    number = rank if number is None else number
    return Member(rank, role, host, host, 1000 + rank, number, "", "", number)


class Story:
    """A roster in which everybody behaves; time moves only when told."""

    def __init__(self, workers=3, servers=0, **policy):
        self.policy = Policy(num_workers=workers, num_servers=servers, is_elastic=True, **policy)
        self.roster = Roster(self.policy)
        self.now_s = 100.0
        self.decisions = []
        for rank in range(workers):
            self(self.roster.join(member(rank), self.now_s))
        for number in range(servers):
            self(self.roster.join(member(workers + number, "server", number), self.now_s))

    def __call__(self, decisions):
        """Note decisions, and return those of a kind."""
        self.decisions = list(decisions)
        return self.decisions

    def of(self, kind):
        return [d for d in self.decisions if isinstance(d, kind)]

    @property
    def changed(self):
        (changed,) = self.of(Changed)
        return changed

    @property
    def now(self):
        return self.roster.membership

    def adopt(self, *skip):
        """Everybody works in the newest generation, and in those that follow from it."""
        all_told = []
        while True:
            generation = self.now.generation
            for rank in self.now.ranks:
                if rank not in skip and rank not in self.now.vacant:
                    all_told += self.roster.entered(rank, generation, self.now_s)
            if self.now.generation == generation:
                self(all_told)
                return

    def lose(self, rank, why="killed by signal 9"):
        return self(self.roster.lost(rank, why, self.now_s))

    def come(self, role="worker", number=None):
        """Reserve a place and be ready; return the rank."""
        place, decisions = self.roster.reserve(role, self.now_s, number)
        newcomer = member(place.rank, role, place.number)
        self([*decisions, *self.roster.ready(newcomer, self.now_s)])
        return place.rank

    def wait(self, seconds, step_s=0.25, beats=None):
        """Let time pass; all members (or `beats`) send heartbeats."""
        found = []
        until_s = self.now_s + seconds
        while self.now_s < until_s - 1e-9:
            self.now_s += step_s
            for rank in self.now.ranks if beats is None else beats:
                found += self.roster.heard(rank, self.now_s)
            found += self.roster.tick(self.now_s)
        return self(found)

    def sync(self):
        """Let every filling copy have everything, until all is quiet."""
        for _ in range(100):
            self.adopt()
            jobs = [(r, p) for p, ranks in enumerate(self.now.filling) for r in ranks]
            if not jobs:
                return
            for rank, partition in jobs:
                self.roster.in_sync(rank, partition, self.now.generation, self.now_s)
        raise AssertionError("it does not end")
