"""The neutral client: what is pushed is applied once, what is pulled is what the servers have."""

from __future__ import annotations

import array

import numpy as np
import pytest
import torch

import paceline as pl
from paceline.ps.client import session
from support import run_ranks

BIG = 100_003  # cut over two servers, and not evenly
# Workers first, then the servers.
HOSTS = {
    "one host": [0, 0, 0, 0],
    "servers elsewhere": [0, 0, 1, 1],
    "one worker elsewhere": [0, 1, 0, 0],
    "a server on each": [0, 1, 0, 1],
}
everywhere = pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)


def gradient(rank: int, step: int, shape: tuple[int, ...]) -> np.ndarray:
    """Whole numbers, so that sums are exact in any order."""
    return np.random.default_rng([rank, step]).integers(-4, 5, shape).astype(np.float32)


def descend(group, pace, shape, steps):
    client = pl.ps.Client(pace)
    is_maker = client.init("w", np.full(shape, 3.0 + pl.rank(), np.float32), lr=0.5)
    first = client.peek("w").wait()
    group.barrier()
    seen = [client.push_pull("w", gradient(pl.rank(), step, shape)).wait() for step in range(steps)]
    group.barrier()
    return is_maker, first, seen, client.pull("w").wait(), client.version("w")


@everywhere
@pytest.mark.parametrize("shape", [(3, 2), (BIG,)], ids=["small", "cut"])
def test_ps_applies_the_mean_once_per_step_and_shows_it_to_all(hosts, shape):
    results = run_ranks(2, descend, "ps", shape, 3, servers=2, hosts=hosts)
    expected = results[0][1]
    for step in range(3):
        mean = (gradient(0, step, shape) + gradient(1, step, shape)) / 2
        expected = expected - np.float32(0.5) * mean
        for _, _, seen, _, _ in results:
            assert np.array_equal(seen[step], expected)
    assert [result[4] for result in results] == [3, 3]


@everywhere
@pytest.mark.parametrize("pace", ["async", "ssp:1"])
def test_every_push_of_every_worker_is_applied_once(hosts, pace):
    results = run_ranks(2, descend, pace, (BIG,), 4, servers=2, hosts=hosts)
    assert sorted(result[0] for result in results) == [False, True]
    (first,) = {3.0 + rank for rank, result in enumerate(results) if result[0]}
    total = sum(gradient(rank, step, (BIG,)) for rank in range(2) for step in range(4))
    for _, shown, _, last, version in results:
        assert np.array_equal(shown, np.full(BIG, first, np.float32))
        assert np.array_equal(last, first - np.float32(0.5) * total)
        assert version == 8


def any_kind_of_array(group):
    client, shape = pl.ps.Client("async"), (4, 6)
    values = np.arange(24, dtype=np.float32).reshape(shape)
    client.init("w", values, lr=1.0)
    ones = np.ones(shape, np.float32)
    engine, outside = pl.empty(shape), torch.ones(shape)
    engine.fill_(1.0)
    flat = np.ones(shape, np.float32)
    flat.flags.writeable = False

    class Foreign:
        """Knows DLPack and nothing else, as arrays of other libraries."""

        def __dlpack__(self, **options):
            return outside.__dlpack__(**options)

        def __dlpack_device__(self):
            return outside.__dlpack_device__()

    kinds = [
        *(ones, np.ones((8, 12), np.float32)[::2, ::-2], flat, engine, engine.numpy(), outside),
        *(torch.ones(6, 4).t(), torch.ones(shape, requires_grad=True), Foreign()),
        memoryview(ones),
    ]
    for number, kind in enumerate(kinds, 1):
        client.push("w", kind).wait()
        assert np.array_equal(client.pull("w").wait(), values - number), type(kind)
    values -= len(kinds)

    strided, foreign = np.zeros((8, 6), np.float32)[::2], torch.zeros(6, 4).t()
    for out in (np.zeros(shape, np.float32), strided, engine, engine.numpy(), foreign):
        assert client.pull("w", out).wait() is out
        assert np.array_equal(np.asarray(out), values), type(out)
        (np.asarray(out))[:] = 0
        assert client.peek("w", out=out).wait() is out
        assert np.array_equal(np.asarray(out), values), type(out)

    numbers = array.array("f", [1.0, 2.0])
    client.init("short", numbers, lr=1.0)
    client.push_pull("short", array.array("f", [1.0, 1.0]), out=numbers).wait()
    assert list(numbers) == [0.0, 1.0]

    assert isinstance(client.push_pull("w", ones).wait(), np.ndarray)
    assert isinstance(client.push_pull("w", outside).wait(), torch.Tensor)
    client.init("halves", torch.ones(3, dtype=torch.bfloat16), lr=1.0)
    client.push("halves", torch.full((3,), 0.5, dtype=torch.bfloat16)).wait()
    assert torch.equal(client.pull("halves").wait(), torch.full((3,), 0.5, dtype=torch.bfloat16))


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]], ids=["one host", "two hosts"])
def test_arrays_of_any_kind_are_pushed_and_filled(hosts):
    run_ranks(1, any_kind_of_array, servers=1, hosts=hosts)


def in_place(group):
    client, grad, out = pl.ps.Client("async"), pl.empty(BIG), pl.empty(BIG)
    grad.fill_(1.0)
    client.init("w", pl.empty(BIG).zero_(), lr=1.0)
    for _ in range(3):
        client.push_pull("w", grad, out).wait()
    assert torch.equal(out, torch.full((BIG,), -3.0))
    return sorted(session.current().keys["w"]._boxes)


def test_engine_memory_is_used_where_it_lies():
    assert run_ranks(1, in_place, servers=2) == [[]]


def results_are_the_callers(group):
    client, ones = pl.ps.Client("async"), np.ones(5, np.float32)
    client.init("w", np.zeros(5, np.float32), lr=1.0)
    kept = client.push_pull("w", ones).wait()
    client.push_pull("w", ones).wait()
    pl.shutdown()
    return kept


def test_a_result_stays_as_it_was():
    (kept,) = run_ranks(1, results_are_the_callers, servers=1)
    assert np.array_equal(kept, np.full(5, -1.0, np.float32))


def many_under_way(group, pace):
    client, names = pl.ps.Client(pace), [f"layer {number}" for number in range(40)]
    for name in names:
        client.init(name, np.zeros(7, np.float32), lr=1.0)
    for step in range(3):  # nobody waits in between: pushes of a key come one after the other
        for name in names:
            client.push(name, np.full(7, 1.0 + step, np.float32))
    pulled = [client.pull(name) for name in names]
    client.wait()
    assert all(work.done() for work in pulled)
    group.barrier()
    sums = {float(client.peek(name).wait()[3]) for name in names}
    assert client.keys() == sorted(names)
    homes = {session.current().keys[n].remote.array_shards[0].link.index for n in names}
    return sums, homes


@pytest.mark.parametrize(("pace", "total"), [("async", -12.0), ("ps", -6.0)])
def test_many_keys_are_under_way_at_once_and_spread_over_the_servers(pace, total):
    for sums, homes in run_ranks(2, many_under_way, pace, servers=2, hosts=[0, 1, 0, 0]):
        assert sums == {total}
        assert homes == {0, 1}


def clients_share(group):
    one, two = pl.ps.Client("async"), pl.ps.Client("async")
    zeros, ones = np.zeros(3, np.float32), np.ones(3, np.float32)
    assert one.init("w", zeros, lr=1.0, momentum=0.5)
    assert not two.init("w", ones, lr=1.0, momentum=0.5)
    one.push("w", ones).wait()
    assert two.push("w", ones).wait() == (2, 0, "")
    assert two.pull("w").wait().tolist() == [-2.5] * 3
    two.configure("w", lr=np.float32(0.0))
    one.push("w", ones).wait()
    assert one.pull("w").wait().tolist() == [-2.5] * 3
    one.configure("w", momentum=0.0)  # the rate is still 0
    one.push("w", ones).wait()
    one.configure("w", lr=2.0)
    return one.push_pull("w", ones).wait().tolist()


def test_clients_of_a_process_share_keys_and_settings_can_change():
    assert run_ranks(1, clients_share, servers=1) == [[-4.5] * 3]


def one_only_reads(group, pace, is_told):
    client, zeros = pl.ps.Client(pace), np.zeros(BIG, np.float32)
    pushers = [0, 2]
    if pl.rank() != 1 or is_told:
        client.init("w", zeros, lr=1.0, workers=pushers)
    group.barrier()
    if pl.rank() == 1:
        for _ in range(5):  # each server shows its part before or after an update, never in between
            seen = client.pull("w").wait()
            assert {seen[0], seen[50_000]} == {seen[25_000]}, "the first server's part"
            assert {seen[50_200], seen[-1]} == {seen[75_000]}, "the second one's"
        client.pull("w", out=pl.empty(BIG)).wait()
    else:
        for _ in range(8):
            client.push_pull("w", np.ones(BIG, np.float32)).wait()
    group.barrier()
    return float(client.pull("w").wait()[-1])


@pytest.mark.parametrize("pace", ["ps", "ssp:0", "ssp:1"])
@pytest.mark.parametrize("is_told", [True, False])
def test_a_rank_that_only_reads_holds_up_nobody(pace, is_told):
    hosts = [0, 0, 1, 0, 1]
    last = run_ranks(3, one_only_reads, pace, is_told, servers=2, hosts=hosts)
    assert set(last) == {-16.0 if pace == "ssp:1" else -8.0}


def take_turns(group):
    client, value = pl.ps.Client("ssp:0", unit="version"), pl.empty(BIG)
    client.init("w", np.zeros(BIG, np.float32), lr=1.0)
    client.pull("w", value).wait()
    receipts = []
    for step in range(5):
        receipts.append(client.push("w", np.ones(BIG, np.float32)).wait())
        if step < 4:
            client.pull("w", value).wait()
    group.barrier()
    assert {receipt.staleness for receipt in receipts} == {0}
    return float(client.peek("w").wait()[0])


def test_a_bound_in_versions_is_kept_on_two_servers():
    assert run_ranks(2, take_turns, servers=2) == [-10.0, -10.0]
