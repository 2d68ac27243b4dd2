"""The checkers of histories find what is wrong, and only that."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.history import (
    Call,
    History,
    Sight,
    counter,
    find_stale,
    find_violations,
    register,
)


def add(invoked_s: float, returned_s: float | None, value: float = 1, client: int = 0) -> Call:
    return Call(client, "cell", "add", value, invoked_s, returned_s)


def read(invoked_s: float, returned_s: float | None, value: float, client: int = 1) -> Call:
    return Call(client, "cell", "read", value, invoked_s, returned_s)


def test_a_read_between_two_adds() -> None:
    assert not find_violations([add(0, 1), read(2, 3, 1), add(4, 5), read(6, 7, 2)])


def test_a_lost_acknowledged_add() -> None:
    (text,) = find_violations([add(0, 1), add(2, 3), read(4, 5, 1)])
    assert "client 1: read 1 of 'cell' [4.0000 .. 5.0000]" in text
    assert "the value is 2 then" in text


def test_an_add_that_counted_twice() -> None:
    assert find_violations([add(0, 1), read(2, 3, 2)])


def test_a_read_that_goes_back() -> None:
    """Each read alone could be right while the add is under way; not the two in this order."""
    under_way = add(0, 10)
    assert not find_violations([under_way, read(1, 2, 0), read(3, 4, 1)])
    assert find_violations([under_way, read(1, 2, 1), read(3, 4, 0)])


def test_a_call_without_an_answer_may_count_late_or_never() -> None:
    assert not find_violations([add(0, None), read(1, 2, 0), read(3, 4, 1)])
    assert not find_violations([add(0, None), read(1, 2, 0), read(3, 4, 0)])
    assert find_violations([add(0, None), read(1, 2, 1), read(3, 4, 0)])
    assert find_violations([add(5, None), read(1, 2, 1)])


def test_keys_are_independent() -> None:
    other = Call(3, "other", "read", 7, 0, 1)
    (text,) = find_violations([add(0, 1), read(2, 3, 1), other])
    assert text.startswith("key 'other'")


def test_a_register() -> None:
    def put(value: float, invoked_s: float, returned_s: float) -> Call:
        return Call(0, "cell", "set", value, invoked_s, returned_s)

    overlapping = [put(1, 0, 10), put(2, 0, 10)]
    for seen in (1, 2):
        assert not find_violations([*overlapping, read(11, 12, seen)], register)
    assert find_violations([*overlapping, read(11, 12, 1), read(13, 14, 2)], register)


moments = st.tuples(st.integers(0, 8), st.integers(0, 8)).map(sorted)
calls = st.one_of(
    st.builds(lambda t, n, ends: add(t[0], t[1] if ends else None, n), moments,
              st.integers(1, 2), st.booleans()),
    st.builds(lambda t, n: read(t[0], t[1], n), moments, st.integers(0, 4)),
)  # fmt: skip


def has_order(history: list[Call]) -> bool:
    """Try all orders, and all choices of the unanswered that count."""
    sure = [c for c in history if c.returned_s is not None]
    doubtful = [c for c in history if c.returned_s is None]
    for mask in range(1 << len(doubtful)):
        some = sure + [c for i, c in enumerate(doubtful) if mask >> i & 1]
        for order in permutations(some):
            state: float = 0
            for place, call in enumerate(order):
                ends = [c.returned_s for c in order[place + 1 :] if c.returned_s is not None]
                fits, state = counter(state, call)
                if not fits or any(end < call.invoked_s for end in ends):
                    break
            else:
                return True
    return False


@settings(max_examples=150, deadline=None)
@given(st.lists(calls, max_size=5))
def test_the_search_agrees_with_trying_everything(history: list[Call]) -> None:
    assert bool(find_violations(history)) == (not has_order(history))


def test_long_histories_are_checked_fast() -> None:
    history, value = [], 0
    for step in range(3000):
        start = float(step)
        history += [add(start, start + 0.5, client=step % 7), add(start, start + 0.6)]
        value += 2
        history.append(read(start + 0.7, start + 0.8, value))
    assert not find_violations(history)


def test_records_pass_between_processes(tmp_path) -> None:
    history = History()
    number = history.begin(0, "cell", "read", 2.0)
    history.begin(0, "cell", "add", 1.0, 1)
    history.end(number, 3.0, 5)
    history.save(tmp_path / "calls")
    both = History.load(tmp_path / "calls")
    assert both.calls == [add(1.0, None), read(2.0, 3.0, 5, client=0)]


def sight(clock: int, seen: dict[int, int], at_s: float = 0.0) -> Sight:
    return Sight(0, clock, seen, at_s, at_s)


@pytest.mark.parametrize(
    ("seen", "complaint"),
    [
        ({0: 5, 1: 3}, None),
        ({0: 5, 1: 8}, None),
        ({0: 5, 1: 2}, "staler than 2, it had to wait for 3"),
        ({0: 5, 1: 9}, "at most 2 \\+ 1 ahead"),
        ({0: 4, 1: 5}, "saw 4 of its own 5"),
    ],
)
def test_staleness(seen: dict[int, int], complaint: str | None) -> None:
    found = find_stale([sight(5, seen)], bound=2)
    assert len(found) == (complaint is not None)
    if complaint is not None:
        with pytest.raises(AssertionError, match=complaint):
            raise AssertionError(found[0])


def test_nobody_waits_for_whoever_left() -> None:
    lives = {1: [(0.0, 10.0)]}
    assert find_stale([sight(5, {0: 5, 1: 2}, at_s=5.0)], 2, lives)
    assert not find_stale([sight(5, {0: 5, 1: 2}, at_s=11.0)], 2, lives)


def test_what_is_seen_never_goes_back() -> None:
    sights = [sight(1, {0: 1, 1: 4}, at_s=1.0), sight(2, {0: 2, 1: 3}, at_s=2.0)]
    (text,) = find_stale(sights, bound=None)
    assert "went back" in text
