"""Placement: where each process of a job runs, and where its replacement runs."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.launcher.hosts.host_list import HostSlots, parse_hosts
from paceline.launcher.hosts.placement import Assignment, HostPlace, Placement, num_slots
from paceline.runtime.process_names import ProcessName, process_names

HOSTS = parse_hosts("a:4,b:4")


def server(number: int) -> ProcessName:
    return ProcessName(100 + number, number, is_server=True)


def hosts_of(placement: Placement, role: int) -> list[int]:
    return [
        assignment.host
        for slot, assignment in sorted(placement.assignments.items())
        if slot[0] == role
    ]


def test_workers_fill_the_hosts_slot_by_slot():
    placement = Placement.fill(HOSTS, 6)
    assert hosts_of(placement, 0) == [0, 0, 0, 0, 1, 1]
    assert placement.place(ProcessName(3, 3)) == HostPlace(0, 2, 3, 4)
    assert placement.place(ProcessName(5, 5)) == HostPlace(1, 2, 1, 2)
    assert placement.used_hosts() == (0, 1)


def test_servers_and_data_workers_take_turns_on_hosts_with_workers():
    placement = Placement.fill(parse_hosts("a:2,b:2,c:2"), 4, 3, 3)
    assert hosts_of(placement, 1) == [0, 1, 0]
    assert hosts_of(placement, 2) == [0, 1, 0]
    assert placement.place(server(2)) == HostPlace(0, 3, 1, 2)
    assert placement.used_hosts() == (0, 1)


def test_servers_run_where_they_are_told_to():
    placement = Placement.fill(parse_hosts("a:2,b:2,c:2"), 4, 3, servers_on=("c", "b"))
    assert hosts_of(placement, 1) == [1, 2, 1]
    placement = Placement.fill(HOSTS, 6, 6, colocated=True)
    assert hosts_of(placement, 1) == hosts_of(placement, 0)
    with pytest.raises(ConfigError, match="--servers-on d: 'd' is not in the list"):
        Placement.fill(HOSTS, 6, 1, servers_on=("d",))


def test_copies_of_a_value_are_on_different_hosts_also_if_one_host_has_no_worker():
    placement = Placement.fill(HOSTS, 2, 2, replicas=2)
    assert hosts_of(placement, 0) == [0, 0]
    assert hosts_of(placement, 1) == [0, 1]
    assert placement.notes() == ["replicas: the 2 copies of a value are on different hosts"]
    (note,) = Placement.fill(HOSTS, 8, 2, replicas=2, servers_on=("a",)).notes()
    assert note.startswith("replicas: the servers are on 1 host, so the 2 copies of a value share")


def test_a_unit_of_a_mesh_stays_on_one_host_where_slots_allow():
    placement = Placement.fill(parse_hosts("a:3,b:5"), 6, unit_size=2)
    assert hosts_of(placement, 0) == [0, 0, 1, 1, 1, 1]
    assert placement.split_units() == [] == placement.notes()
    placement = Placement.fill(parse_hosts("a:3,b:3"), 6, unit_size=2)
    assert hosts_of(placement, 0) == [0, 0, 1, 1, 0, 1]
    assert placement.split_units() == [2]
    assert placement.notes() == [
        "mesh: 1 unit of 2 workers does not fit on one host and will be slower; give slots in"
        " multiples of 2"
    ]


def test_more_workers_than_slots_are_refused():
    with pytest.raises(ConfigError, match=r"-n 9: the hosts have 8 slots \(a:4, b:4\); give -n 8"):
        Placement.fill(HOSTS, 9)


def test_the_lines_name_every_host():
    placement = Placement.fill(parse_hosts("a:4,b:4,c:1"), 6, 2, 1)
    assert placement.lines() == [
        "a (4 slots): ranks 0-3 and server 0 and data worker 0",
        "b (4 slots): ranks 4-5 and server 1",
        "c (1 slot): no process",
    ]


# -- newcomers ----------------------------------------------------------------------------------


def test_a_replacement_returns_to_the_host_of_its_predecessor():
    placement = Placement.fill(HOSTS, 6, 2)
    newcomer = ProcessName(8, 4, is_newcomer=True)
    running = [slot for slot in placement.assignments if slot != newcomer.slot]
    host = placement.host_for_newcomer(newcomer, [0, 1], running)
    assert host == 1
    assert placement.with_newcomer(newcomer, host, running).place(newcomer) == HostPlace(1, 2, 0, 2)


def test_after_the_loss_of_a_host_replacements_use_the_free_slots_of_others():
    placement = Placement.fill(parse_hosts("a:2,b:3,c:4"), 5, 2)
    running = {slot for slot, assignment in placement.assignments.items() if assignment.host != 1}
    found = []
    for number in (2, 3, 4):
        newcomer = ProcessName(10 + number, number, is_newcomer=True)
        host = placement.host_for_newcomer(newcomer, [0, 2], running)
        assert host is not None
        placement = placement.with_newcomer(newcomer, host, running | {newcomer.slot})
        running.add(newcomer.slot)
        found.append(placement.assignments[newcomer.slot])
    assert found == [Assignment(2, 0), Assignment(2, 1), Assignment(2, 2)]
    assert placement.host_for_newcomer(server(1), [0, 2], running) == 2


def test_no_host_gets_more_workers_than_slots():
    placement = Placement.fill(HOSTS, 8, 2)
    running = [slot for slot, assignment in placement.assignments.items() if assignment.host == 0]
    newcomer = ProcessName(10, 5, is_newcomer=True)
    assert placement.host_for_newcomer(newcomer, [0], running) is None
    assert placement.host_for_newcomer(newcomer, [], running) is None
    assert placement.host_for_newcomer(server(1), [0], running) == 0


def test_a_newcomer_takes_the_lowest_free_local_rank():
    placement = Placement.fill(HOSTS, 8)
    running = set(placement.assignments) - {(0, 1), (0, 6)}
    newcomer = ProcessName(9, 8, is_newcomer=True)  # another number: the job was scaled
    placement = placement.with_newcomer(newcomer, 0, running)
    assert placement.assignments[newcomer.slot] == Assignment(0, 1)
    assert placement.place(newcomer) == HostPlace(0, 2, 1, 4)
    assert placement.without({(0, 1)}).num_workers(0) == 4


def test_a_newcomer_joins_its_unit():
    placement = Placement.fill(parse_hosts("a:3,b:8"), 8, unit_size=2)
    assert hosts_of(placement, 0) == [0, 0, 1, 1, 1, 1, 1, 1]
    placement = placement.with_newcomer(ProcessName(8, 8), 0, list(placement.assignments))
    running = list(placement.assignments)
    assert placement.host_for_newcomer(ProcessName(9, 9), [0, 1], running) == 1  # a is full
    running.remove((0, 0))
    assert placement.host_for_newcomer(ProcessName(9, 9), [0, 1], running) == 0


def test_a_host_can_be_added():
    placement = Placement.fill(HOSTS, 8).with_host(HostSlots("c", 2))
    running = list(placement.assignments)
    assert placement.host_for_newcomer(ProcessName(8, 8), [0, 1, 2], running) == 2
    with pytest.raises(ConfigError, match="host A is already in the job"):
        placement.with_host(HostSlots("A", 2))


# -- properties ---------------------------------------------------------------------------------


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Placement, list[ProcessName]]:
    slots = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    hosts = tuple(HostSlots(f"h{index}", count) for index, count in enumerate(slots))
    unit_size = draw(st.sampled_from([size for size in (1, 2, 3, 4) if size <= num_slots(hosts)]))
    units = draw(st.integers(1, num_slots(hosts) // unit_size))
    num_workers = units * unit_size
    colocated = draw(st.booleans())
    num_servers = num_workers if colocated else draw(st.integers(0, 6))
    servers_on = () if colocated else tuple(draw(st.sets(st.sampled_from([h.name for h in hosts]))))
    num_data_workers = draw(st.integers(0, 5))
    placement = Placement.fill(
        hosts,
        num_workers,
        num_servers,
        num_data_workers,
        servers_on=servers_on,
        colocated=colocated,
        replicas=draw(st.integers(1, 3)),
        unit_size=unit_size,
    )
    return placement, process_names(num_workers, num_servers, num_data_workers)


@given(jobs())
def test_each_process_has_one_seat_and_no_host_is_above_its_slots(
    job: tuple[Placement, list[ProcessName]],
):
    placement, names = job
    assert sorted(placement.assignments) == sorted(name.slot for name in names)
    for index, host in enumerate(placement.hosts):
        workers = [name for name in names if name.is_worker and placement.host_of(name) == index]
        assert len(workers) == placement.num_workers(index) <= host.slots
    for role in range(3):
        here = [name for name in names if name.slot[0] == role]
        for index in range(len(placement.hosts)):
            ranks = [placement.place(n).local_rank for n in here if placement.host_of(n) == index]
            assert ranks == list(range(len(ranks)))
    for name in names:
        place = placement.place(name)
        assert 0 <= place.host_index < place.num_hosts
        if name.is_worker:
            assert place.local_world_size == placement.num_workers(place.host_index)
    split = sum(host.slots // placement.unit_size for host in placement.hosts)
    num_units = sum(name.is_worker for name in names) // placement.unit_size
    assert len(placement.split_units()) <= max(0, num_units - split)


@given(jobs(), st.data())
def test_after_any_losses_no_host_is_above_its_slots(
    job: tuple[Placement, list[ProcessName]], data: st.DataObject
):
    placement, names = job
    all_hosts = range(len(placement.hosts))
    dead = data.draw(st.sets(st.sampled_from(list(all_hosts))))
    living = [host for host in all_hosts if host not in dead]
    running = {name.slot for name in names if placement.host_of(name) in living}
    running -= data.draw(st.sets(st.sampled_from([name.slot for name in names])))
    for name in names:
        if name.slot in running:
            continue
        host = placement.host_for_newcomer(name, living, running)
        if host is None:
            assert not living or name.is_worker
            continue
        assert host in living
        running.add(name.slot)
        placement = placement.with_newcomer(name, host, running)
        place = placement.place(name)
        assert place.host_index == host
        if name.is_worker:
            assert place.local_rank < place.local_world_size <= placement.hosts[host].slots
    assignments = {slot: placement.assignments[slot] for slot in running}
    assert all(assignment.host in living for assignment in assignments.values())
    for role in range(3):
        taken = [assignment for slot, assignment in assignments.items() if slot[0] == role]
        assert len(taken) == len(set(taken))
    workers = Counter(assignment.host for slot, assignment in assignments.items() if slot[0] == 0)
    assert all(count <= placement.hosts[host].slots for host, count in workers.items())


def test_a_replacement_avoids_a_host_that_others_cannot_reach():
    placement = Placement.fill(parse_hosts("a:1,b:1,c:2"), 3)
    worker = ProcessName(3, 1, is_newcomer=True)
    running = [(0, 0), (0, 2)]
    assert placement.host_for_newcomer(worker, [0, 1, 2], running) == 1
    placement = placement.avoiding_host_of(worker)
    assert placement.host_for_newcomer(worker, [0, 1, 2], running) == 2
    placement = placement.with_newcomer(worker, 2, running)
    assert placement.host_for_newcomer(worker, [0, 1, 2], running) == 2
    full = Placement.fill(parse_hosts("a:1,b:1,c:1"), 3).avoiding_host_of(worker)
    assert full.host_for_newcomer(worker, [0, 1, 2], running) == 1  # there is no other slot
