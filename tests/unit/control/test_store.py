"""One table of expectations for the store: over a connection, and in a job of one process."""

from __future__ import annotations

import threading
import time

import pytest

from paceline.control.client.local_agent import LocalAgent
from paceline.errors import PeerTimeout, UsageError


@pytest.fixture(params=["connected", "alone"])
def store(request, cluster):
    if request.param == "alone":
        return LocalAgent()
    return cluster.start(2).agent(0)


@pytest.fixture
def in_background():
    """Run a function in a thread that is joined when the test ends."""
    threads = []

    def start(function, *args):
        threads.append(threading.Thread(target=function, args=args))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join()


def test_set_get_check_delete_count(store):
    assert store.store_num_keys() == 0
    store.store_set("a", b"1")
    store.store_set("a", b"2")
    store.store_set("b", b"")
    assert store.store_get("a", 1) == b"2"
    assert store.store_get("b", 1) == b""
    assert store.store_check(["a", "b"]) is True
    assert store.store_check(["a", "c"]) is False
    assert store.store_num_keys() == 2
    assert store.store_delete("a") is True
    assert store.store_delete("a") is False
    assert store.store_num_keys() == 1


def test_add_counts_from_zero_and_leaves_readable_text(store):
    assert store.store_add("n", 5) == 5
    assert store.store_add("n", -7) == -2
    assert store.store_get("n", 1) == b"-2"
    store.store_set("word", b"hello")
    with pytest.raises(UsageError, match="'word'"):
        store.store_add("word", 1)


def test_compare_set_follows_torch(store):
    assert store.store_compare_set("k", b"old", b"new") == b"old"  # absent: nothing happens
    assert store.store_check(["k"]) is False
    assert store.store_compare_set("k", b"", b"first") == b"first"
    assert store.store_compare_set("k", b"wrong", b"second") == b"first"
    assert store.store_compare_set("k", b"first", b"second") == b"second"


def test_get_waits_for_another_to_set(store, in_background):
    in_background(lambda: (time.sleep(0.1), store.store_set("late", b"now")))
    assert store.store_get("late", 10) == b"now"


def test_wait_needs_all_keys(store, in_background):
    store.store_set("one", b"")
    in_background(lambda: (time.sleep(0.05), store.store_set("two", b"")))
    in_background(lambda: (time.sleep(0.1), store.store_add("three", 1)))
    store.store_wait(["one", "two", "three"], 10)
    assert store.store_check(["one", "two", "three"])


def test_a_wait_in_vain_names_the_keys_that_nobody_set(store):
    store.store_set("there", b"")
    with pytest.raises(PeerTimeout, match=r"waited 0.05 s.*\['absent'\]"):
        store.store_wait(["there", "absent"], 0.05)
    with pytest.raises(PeerTimeout, match="'absent'"):
        store.store_get("absent", 0.05)
    store.store_set("absent", b"late")  # nobody waits any more, and nothing breaks
    assert store.store_get("absent", 1) == b"late"


def test_many_members_share_one_table(cluster):
    agents = [cluster.start(2).agent(0), cluster.agent(1)]
    threads = [
        threading.Thread(target=lambda a=agent: [a.store_add("sum", 1) for _ in range(50)])
        for agent in agents * 2
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert agents[0].store_get("sum", 1) == b"200"


def test_values_may_be_large_but_not_boundless(cluster):
    agent = cluster.start(1).agent(0)
    value = bytes(8 << 20)
    agent.store_set("large", value)
    assert agent.store_get("large", 10) == value
    with pytest.raises(UsageError, match="StoreSet of 67108"):
        agent.store_set("boundless", bytes(64 << 20))
    assert agent.store_num_keys() == 1  # the connection is as good as before
