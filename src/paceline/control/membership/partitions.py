"""Which servers hold which partition: pure arithmetic on ranks.

A layout has for each partition its HOLDERS (the primary first) and its FILLING copies, which are
catching up. A layout changes in small steps. Each is safe once every member works with the layout
before it:

    loss       the lost server is removed; the next holder becomes the primary
    fill       a partition with too few copies gets a filling one
    sync       a filling copy that has caught up becomes the last holder
    switch     the last holder becomes the primary; the old primary becomes a backup
    drop       a surplus holder is removed; never the primary

A MOVE from one server to another is fill, sync, switch (if it was the primary) and drop, so a
partition never has too few copies. `next_layout` finds the next steps: towards enough copies, away
from servers that are to leave, towards copies on different hosts, and towards an equal number of
copies per server. A new copy goes to a host without a copy if there is one; copies that came to
share a host (the others were lost) are moved apart when there is another host again. A fill is
never cancelled; only a loss ends it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec

Ranks: TypeAlias = tuple[int, ...]


class PartitionLayout(msgspec.Struct, frozen=True):
    """By partition: its holders, primary first, and its copies that are being filled."""

    holders: tuple[Ranks, ...] = ()
    filling: tuple[Ranks, ...] = ()

    def copies(self, partition: int) -> Ranks:
        return self.holders[partition] + self.filling[partition]

    def load(self, rank: int) -> int:
        """Return how many copies a server has or will have."""
        return sum(rank in self.copies(p) for p in range(len(self.holders)))

    def primaries(self, rank: int) -> int:
        return sum(ranks[:1] == (rank,) for ranks in self.holders)

    def without(self, gone: Collection[int]) -> PartitionLayout:
        """Return the layout after a loss."""
        holders, filling = (
            tuple(tuple(r for r in ranks if r not in gone) for ranks in by_partition)
            for by_partition in (self.holders, self.filling)
        )
        return PartitionLayout(holders, filling)

    def synced(self, partition: int, rank: int) -> PartitionLayout:
        """Return the layout after a filling copy has caught up."""
        assert rank in self.filling[partition], (rank, partition, self)
        left = tuple(r for r in self.filling[partition] if r != rank)
        return self._with(partition, (*self.holders[partition], rank), left)

    @property
    def lost(self) -> Ranks:
        """The partitions without a holder."""
        return tuple(p for p, ranks in enumerate(self.holders) if not ranks)

    def _with(self, partition: int, holders: Ranks, filling: Ranks) -> PartitionLayout:
        return PartitionLayout(
            _replaced(self.holders, partition, holders), _replaced(self.filling, partition, filling)
        )


def initial_layout(num_partitions: int, replicas: int, hosts: Mapping[int, str]) -> PartitionLayout:
    """Return the first layout: primaries in turn, then backups. `hosts`: by server, in order."""
    servers = list(hosts)
    none: tuple[Ranks, ...] = ((),) * num_partitions
    layout = PartitionLayout(
        tuple((servers[p % len(servers)],) for p in range(num_partitions)), none
    )
    for _ in range(1, min(replicas, len(servers))):
        for partition in range(num_partitions):
            target = _target(layout, partition, hosts)
            assert target is not None
            layout = layout._with(partition, (*layout.holders[partition], target), ())
    return layout


def add_missing_copies(
    layout: PartitionLayout, replicas: int, hosts: Mapping[int, str]
) -> PartitionLayout:
    """Add filling copies of each partition that has too few; `hosts`: of the possible servers."""
    for partition in range(len(layout.holders)):
        while sum(r in hosts for r in layout.copies(partition)) < replicas:
            target = _target(layout, partition, hosts)
            if target is None:
                break
            layout = _fill(layout, partition, target)
    return layout


def next_layout(
    layout: PartitionLayout,
    replicas: int,
    hosts: Mapping[int, str],
    leaving: Collection[int] = (),
    wanted: int = 0,
) -> PartitionLayout:
    """Return the layout after the next steps; the same one if there is nothing to do.

    Call this only when every member works with `layout`. `hosts` has all servers, also those that
    are `leaving`; `wanted`: how many servers the job is to have. If copies are missing and a server
    is still to join, nothing is moved for balance: missing copies come first.
    """
    staying = {rank: host for rank, host in hosts.items() if rank not in leaving}
    after = _drop_surplus(layout, replicas, leaving, hosts)
    after = add_missing_copies(after, replicas, staying or hosts)
    fewest = min(len(layout.copies(partition)) for partition in range(len(layout.holders)))
    if fewest < min(replicas, wanted):
        return after
    if after == layout and not any(layout.filling):
        after = _spread_one(layout, staying)
    if after == layout and not any(layout.filling):
        after = _move_one(layout, staying)
    if after == layout and not any(layout.filling):
        after = _switch_one_primary(layout, staying)
    return after


def _drop_surplus(
    layout: PartitionLayout, replicas: int, leaving: Collection[int], hosts: Mapping[int, str]
) -> PartitionLayout:
    """Drop a surplus copy of each partition, one that shares its host with another copy if there is
    one; if that is its primary, switch the primary first."""
    for partition, holders in enumerate(layout.holders):
        if len(holders) <= replicas:
            continue
        # Not by primaries: a switch changes those, and the next step must choose the same copy.
        num_on = Counter(hosts.get(r, "") for r in holders if r not in leaving)
        victim = max(
            holders,
            key=lambda r: (r in leaving, num_on[hosts.get(r, "")] > 1, layout.load(r), r),
        )
        if victim == holders[0]:
            after = (holders[-1], *holders[:-1])
        else:
            after = tuple(rank for rank in holders if rank != victim)
        layout = layout._with(partition, after, layout.filling[partition])
    return layout


def _spread_one(layout: PartitionLayout, hosts: Mapping[int, str]) -> PartitionLayout:
    """Begin to move a copy that shares its host with another one to a host without a copy."""
    num_hosts = _num_hosts(hosts, hosts)
    for partition, holders in enumerate(layout.holders):
        if _num_hosts(holders, hosts) < min(len(holders), num_hosts):
            target = _target(layout, partition, hosts)
            assert target is not None, "a host without a copy has a server"
            return _fill(layout, partition, target)
    return layout


def _move_one(layout: PartitionLayout, hosts: Mapping[int, str]) -> PartitionLayout:
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


def _switch_one_primary(layout: PartitionLayout, hosts: Mapping[int, str]) -> PartitionLayout:
    """Make a backup the primary if one server has two more primaries than another."""
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


def _target(layout: PartitionLayout, partition: int, hosts: Mapping[int, str]) -> int | None:
    """Return the server for another copy: on a host without one, then with the fewest copies, then
    in turn."""
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


def _fill(layout: PartitionLayout, partition: int, target: int) -> PartitionLayout:
    filling = (*layout.filling[partition], target)
    return layout._with(partition, layout.holders[partition], filling)


def _replaced(by_partition: Sequence[Ranks], partition: int, ranks: Ranks) -> tuple[Ranks, ...]:
    return (*by_partition[:partition], ranks, *by_partition[partition + 1 :])
