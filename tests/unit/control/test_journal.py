"""The journal: what was written is there again, whatever happened to the writer."""

from __future__ import annotations

import os
import random

import msgspec
import pytest

from paceline.control import messages as m
from paceline.control.coordinator.journal import CoordinatorState, Header, Journal, Recorded
from paceline.control.coordinator.store import Answered, Forgotten, Stored, StoreService
from paceline.control.member import Member, Membership
from paceline.control.membership.policy import Policy
from paceline.control.membership.state import RosterState
from paceline.errors import BadFrame, SetupError

POLICY = Policy(num_workers=2, is_elastic=True)


def open_journal(path):
    return Journal(path, "job-1", POLICY)


def entries_of(path):
    journal = open_journal(path)
    journal.close()
    return journal.entries[1:]


def membership(generation, ranks=(0, 1)):
    members = tuple(Member(r, "worker", "h", "h", r, r, "", "", r) for r in ranks)
    return Membership(generation, members)


def recorded(generation, ranks=(0, 1), lost=()):
    losses = tuple(m.Loss(rank, rank, "worker", "h", "killed") for rank in lost)
    changed = m.Changed(membership(generation, ranks), losses)
    return Recorded(RosterState(changed.membership, next_rank=generation), (changed,))


SOME = [
    recorded(1),
    Stored("k", b"v", 0, 7, None),
    Stored("k", None, 1, 8, True),
    Answered(1, 9, b"\x00"),
    Forgotten(1),
    recorded(2, (0,), (1,)),
]


def test_what_was_written_is_there_again(tmp_path):
    path = tmp_path / "journal"
    journal = open_journal(path)
    for entry in SOME:
        journal.append(entry, sync=isinstance(entry, Recorded))
    journal.close()
    journal.close()
    assert entries_of(path) == SOME
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_loss_of_a_journal_without_kinds_is_understood():
    loss = m.Loss(1, 1, "worker", "h", "killed", m.LossKind.KILLED)
    written = msgspec.to_builtins(loss)
    del written["kind"]
    assert msgspec.convert(written, m.Loss).kind is m.LossKind.ENDED
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(loss), type=m.Loss) == loss


def test_a_torn_tail_is_cut_at_every_byte(tmp_path):
    path = tmp_path / "journal"
    journal = open_journal(path)
    sizes = [journal.size_bytes]
    for entry in SOME:
        journal.append(entry)
        sizes.append(journal.size_bytes)
    journal.close()
    whole = path.read_bytes()
    for length in range(sizes[0], len(whole)):
        path.write_bytes(whole[:length])
        kept = max(n for n, size in enumerate(sizes) if size <= length)
        assert entries_of(path) == SOME[:kept]
        assert path.stat().st_size == sizes[kept], "the tail is gone for good"
        journal = open_journal(path)
        journal.append(SOME[0])
        journal.close()
        assert entries_of(path) == [*SOME[:kept], SOME[0]]
        path.write_bytes(whole)


def test_damage_before_the_end_is_an_error_that_names_the_place(tmp_path):
    path = tmp_path / "journal"
    journal = open_journal(path)
    start = journal.size_bytes
    for entry in SOME:
        journal.append(entry)
    journal.close()
    whole = bytearray(path.read_bytes())
    whole[start + 12] ^= 1
    path.write_bytes(whole)
    with pytest.raises(BadFrame, match=rf"damaged at byte {start} of {len(whole)}"):
        open_journal(path)


def test_a_bit_flip_in_the_last_entry_is_as_good_as_torn(tmp_path):
    path = tmp_path / "journal"
    journal = open_journal(path)
    for entry in SOME:
        journal.append(entry)
    journal.close()
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    assert entries_of(path) == SOME[:-1]


def test_a_journal_belongs_to_one_job_and_one_coordinator(tmp_path, monkeypatch):
    path = tmp_path / "journal"
    journal = open_journal(path)
    monkeypatch.setattr("paceline.control.coordinator.journal._LOCK_S", 0.05)
    with pytest.raises(SetupError, match="used by another coordinator"):
        open_journal(path)
    journal.close()
    with pytest.raises(SetupError, match="belongs to job job-1, expected job-2"):
        Journal(path, "job-2", POLICY)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SetupError, match="cannot be opened"):
        open_journal(path)


def test_a_journal_written_anew_says_the_same_in_short(tmp_path):
    path = tmp_path / "journal"
    store = StoreService()
    record = CoordinatorState(open_journal(path), store)
    for generation in range(1, 400):
        record.keep(RosterState(membership(generation)), (m.Changed(membership(generation)),))
    store.handle(m.StoreSet(5, "key", b"value"), lambda _: None, 1)
    assert store._once(m.StoreAdd(6, "n", 3), 0) == 3
    before = path.stat().st_size
    record._journal.rewrite(record._entries())
    assert path.stat().st_size < before
    store._once(m.StoreAdd(7, "n", 4), 0)
    record.close()
    assert not list(tmp_path.glob("*.new"))

    again = StoreService()
    replayed = CoordinatorState(open_journal(path), again)
    assert replayed.state == record.state
    assert replayed._history == record._history
    assert again._store.items() == store._store.items()
    assert again._once(m.StoreAdd(6, "n", 3), 0) == 3, "asked again: answered, not added"
    assert again._once(m.StoreAdd(7, "n", 4), 0) == 7
    assert again._once(m.StoreAdd(8, "n", 1), 0) == 8
    replayed.close()


def test_a_long_journal_is_shortened_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.control.coordinator.journal.MAX_BYTES", 2000)
    path = tmp_path / "journal"
    record = CoordinatorState(open_journal(path), StoreService())
    monkeypatch.setattr("paceline.control.coordinator.journal._HISTORY", 4)
    record._history = type(record._history)(maxlen=4)
    for generation in range(1, 50):
        record.keep(RosterState(membership(generation)), (m.Changed(membership(generation)),))
        record.shorten()
    record.close()
    assert path.stat().st_size < 4000
    replayed = CoordinatorState(open_journal(path), StoreService())
    assert replayed.state.membership.generation == 49
    replayed.close()


def test_what_a_member_missed_is_one_change():
    record = CoordinatorState(None, StoreService())
    for entry in (recorded(1), recorded(2, (0, 1, 2)), recorded(3, (0, 2), lost=(1,))):
        record.keep(entry.state, entry.changes)
    now = record.state.membership
    nothing = record.missed(now, 3)
    assert (nothing.changed, nothing.is_known) == (None, True)
    missed = record.missed(now, 1)
    assert missed.changed.membership == now
    assert missed.lost == {1}
    assert missed.is_known
    assert not record.missed(now, -5).is_known


def test_random_bytes_are_never_an_entry(tmp_path):
    path = tmp_path / "journal"
    chance = random.Random(5)
    for _ in range(200):
        path.write_bytes(chance.randbytes(chance.randrange(1, 64)))
        os.chmod(path, 0o600)
        try:
            journal = open_journal(path)
        except BadFrame:
            continue
        assert journal.entries == []
        assert path.read_bytes(), "it begins anew, with its header"
        journal.close()
        assert isinstance(open_and_close(path).entries[0], Header)


def open_and_close(path):
    journal = open_journal(path)
    journal.close()
    return journal
