"""Which servers hold which partition: pure arithmetic on ranks.

A LAYOUT says of each partition its HOLDERS (the primary first) and those that are FILLING. A
layout changes in small steps, each of which is safe once everybody works with the one before:

    loss       the lost server goes; the next holder is the primary
    fill       a partition with too few copies gets a filling one
    sync       a filling copy that has everything becomes the last holder
    hand over  the last holder becomes the primary; the old one stays, as a backup
    drop       a holder too many goes; never the primary

A MOVE from one server to another is fill, sync, hand over (when it was the primary) and drop; so a
partition is never without its copies. `relieved` finds the next steps: towards enough copies, away
from servers that are to leave, and towards servers that hold equally many. A copy prefers a host
on which there is none yet. A fill is never called off, only ended by a loss.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec

Ranks: TypeAlias = tuple[int, ...]


class Layout(msgspec.Struct, frozen=True):
    """By partition: its holders, primary first, and its copies that are being filled."""

    holders: tuple[Ranks, ...] = ()
    filling: tuple[Ranks, ...] = ()

    def copies(self, partition: int) -> Ranks:
        return self.holders[partition] + self.filling[partition]

    def load(self, rank: int) -> int:
        """How many copies a server has or will have."""
        return sum(rank in self.copies(p) for p in range(len(self.holders)))

    def primaries(self, rank: int) -> int:
        return sum(ranks[:1] == (rank,) for ranks in self.holders)

    def without(self, gone: Collection[int]) -> Layout:
        """The layout after a loss."""
        holders, filling = (
            tuple(tuple(r for r in ranks if r not in gone) for ranks in by_partition)
            for by_partition in (self.holders, self.filling)
        )
        return Layout(holders, filling)

    def synced(self, partition: int, rank: int) -> Layout:
        """The layout when a filling copy has everything."""
        assert rank in self.filling[partition], (rank, partition, self)
        left = tuple(r for r in self.filling[partition] if r != rank)
        return self._with(partition, (*self.holders[partition], rank), left)

    @property
    def lost(self) -> Ranks:
        """The partitions that nobody holds."""
        return tuple(p for p, ranks in enumerate(self.holders) if not ranks)

    def _with(self, partition: int, holders: Ranks, filling: Ranks) -> Layout:
        return Layout(
            _replaced(self.holders, partition, holders), _replaced(self.filling, partition, filling)
        )


def spread(num_partitions: int, replicas: int, hosts: Mapping[int, str]) -> Layout:
    """The first layout: primaries in turn, then the backups. `hosts`: of each server, in order."""
    servers = list(hosts)
    none: tuple[Ranks, ...] = ((),) * num_partitions
    layout = Layout(tuple((servers[p % len(servers)],) for p in range(num_partitions)), none)
    for _ in range(1, min(replicas, len(servers))):
        for partition in range(num_partitions):
            target = _target(layout, partition, hosts)
            assert target is not None
            layout = layout._with(partition, (*layout.holders[partition], target), ())
    return layout


def filled(layout: Layout, replicas: int, hosts: Mapping[int, str]) -> Layout:
    """Begin to fill a copy of each partition that has too few; `hosts`: of the possible servers."""
    for partition in range(len(layout.holders)):
        while sum(r in hosts for r in layout.copies(partition)) < replicas:
            target = _target(layout, partition, hosts)
            if target is None:
                break
            layout = _fill(layout, partition, target)
    return layout


def relieved(
    layout: Layout,
    replicas: int,
    hosts: Mapping[int, str],
    leaving: Collection[int] = (),
    wanted: int = 0,
) -> Layout:
    """Return the layout after the next steps; the same one when there is nothing to do.

    To be called only when everybody works with `layout`. `hosts` has all servers, also those that
    are `leaving`; `wanted`: how many the job is to have. While one is awaited that copies are
    missing for, nothing is moved for balance: copies are refilled first.
    """
    staying = {rank: host for rank, host in hosts.items() if rank not in leaving}
    after = _shed(layout, replicas, leaving)
    after = filled(after, replicas, staying or hosts)
    fewest = min(len(layout.copies(partition)) for partition in range(len(layout.holders)))
    if fewest < min(replicas, wanted):
        return after
    if after == layout and not any(layout.filling):
        after = _move_one(layout, staying)
    if after == layout and not any(layout.filling):
        after = _hand_one_over(layout, staying)
    return after


def _shed(layout: Layout, replicas: int, leaving: Collection[int]) -> Layout:
    """Drop a copy too many of each partition, or hand over what its primary still has to do."""
    for partition, holders in enumerate(layout.holders):
        if len(holders) <= replicas:
            continue
        # Not by primaries: handing over changes those, and the next step must choose the same.
        victim = max(holders, key=lambda r: (r in leaving, layout.load(r), r))
        if victim == holders[0]:
            after = (holders[-1], *holders[:-1])
        else:
            after = tuple(rank for rank in holders if rank != victim)
        layout = layout._with(partition, after, layout.filling[partition])
    return layout


def _move_one(layout: Layout, hosts: Mapping[int, str]) -> Layout:
    """Begin to move a copy from the server with most of them to the one with fewest."""
    load = {rank: layout.load(rank) for rank in hosts}
    primaries = {rank: layout.primaries(rank) for rank in hosts}
    by_load = sorted(hosts, key=lambda r: (load[r], primaries[r]))
    for source in reversed(by_load):
        for target in by_load:
            if load[source] - load[target] < 2:
                break
            movable = [
                p
                for p, holders in enumerate(layout.holders)
                if source in holders
                and target not in holders
                and not _loses_a_host(holders, source, target, hosts)
            ]
            if movable:
                excess = primaries[source] > primaries[target]
                first = min(movable, key=lambda p: (layout.holders[p][0] == source) != excess)
                return _fill(layout, first, target)
    return layout


def _hand_one_over(layout: Layout, hosts: Mapping[int, str]) -> Layout:
    """Make a backup the primary where one server is primary of two more than another."""
    primaries = {rank: layout.primaries(rank) for rank in hosts}
    by_primaries = sorted(hosts, key=lambda r: (primaries[r], r))
    for target in by_primaries:
        for source in reversed(by_primaries):
            if primaries[source] - primaries[target] < 2:
                break
            for partition, holders in enumerate(layout.holders):
                if holders[0] == source and target in holders:
                    after = (target, *(r for r in holders if r != target))
                    return layout._with(partition, after, layout.filling[partition])
    return layout


def _target(layout: Layout, partition: int, hosts: Mapping[int, str]) -> int | None:
    """Choose who gets another copy: a host without one, then whoever has least, then in turn."""
    copies = layout.copies(partition)
    taken = {hosts[rank] for rank in copies if rank in hosts}
    free = [rank for rank in hosts if rank not in copies]
    order = list(hosts)
    start = order.index(copies[0]) if copies and copies[0] in hosts else 0
    return min(
        free,
        key=lambda r: (hosts[r] in taken, layout.load(r), (order.index(r) - start) % len(order)),
        default=None,
    )


def _loses_a_host(holders: Ranks, source: int, target: int, hosts: Mapping[int, str]) -> bool:
    before = _num_hosts(holders, hosts)
    return _num_hosts((*(r for r in holders if r != source), target), hosts) < before


def _num_hosts(ranks: Iterable[int], hosts: Mapping[int, str]) -> int:
    return len({hosts.get(rank, "") for rank in ranks})


def _fill(layout: Layout, partition: int, target: int) -> Layout:
    filling = (*layout.filling[partition], target)
    return layout._with(partition, layout.holders[partition], filling)


def _replaced(by_partition: Sequence[Ranks], partition: int, ranks: Ranks) -> tuple[Ranks, ...]:
    return (*by_partition[:partition], ranks, *by_partition[partition + 1 :])
