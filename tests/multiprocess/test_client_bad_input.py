"""What the neutral client refuses, and in which words."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
import torch

import paceline as pl
from paceline.errors import NonFiniteGradient, ShapeMismatch, UnknownKey, UsageError
from support import run_processes, run_ranks
from support.environs import base_environ

BIG = 100_003  # cut over two servers
ONES = np.ones((3, 2), np.float32)


def refused(kind: type[Exception], match: str, call) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        call()
    assert type(caught.value) is kind, caught.value


def on_keys(group):
    client = pl.ps.Client("async")
    refused(UnknownKey, "rank 0: no server has a key 'w'; known keys: none. init", client_pull("w"))
    client.init("bias", ONES[0])
    client.init("weights", ONES, optimizer="SGD", lr=0.1)
    refused(UnknownKey, "no server has a key 'w'; known keys: 'bias', 'weights'", client_pull("w"))
    for call in (client.push, client.push_pull):
        refused(UnknownKey, "no server has a key 'w'", lambda call=call: call("w", ONES))
    for call in (client.peek, client.version, client.subscribe):
        refused(UnknownKey, "no server has a key 'w'", lambda call=call: call("w"))

    # Nothing of this has changed anything.
    assert not client.init("weights", 5 * ONES, optimizer="SGD", lr=0.1)
    assert np.array_equal(client.pull("weights").wait(), ONES)
    exists = r"key 'weights' exists with shape \[3, 2\] and dtype float32, but worker 0 wants it"
    refused(
        ShapeMismatch,
        rf"{exists} with shape \[2, 3\] and dtype float32",
        lambda: client.init("weights", ONES.T, lr=0.1),
    )
    refused(
        ShapeMismatch,
        rf"{exists} with shape \[3, 2\] and dtype float64",
        lambda: client.init("weights", ONES.astype(float), lr=0.1),
    )
    other = "key 'weights' exists with optimizer .*'SGD'.*, but worker 0 wants it with .*'Adam'"
    refused(UsageError, other, lambda: client.init("weights", ONES, "Adam", lr=0.1))
    other = "key 'weights' exists with rule Rule.bound=None.* wants it with Rule.bound=3"
    refused(UsageError, other, lambda: pl.ps.Client("ssp").init("weights", ONES, lr=0.1))
    assert client.version("weights") == 0


def client_pull(key: str):
    return lambda: pl.ps.Client("async").pull(key)


def on_init(group):
    client = pl.ps.Client("async")
    settings = "key 'w': torch.optim.SGD has no setting 'momentm'; it has lr, momentum,"
    refused(UsageError, settings, lambda: client.init("w", ONES, lr=0.1, momentm=0.9))
    rate = "key 'w': lr=-0.1 must be a number >= 0"
    refused(UsageError, rate, lambda: client.init("w", ONES, lr=-0.1))
    moment = "key 'w': torch.optim.SGD refuses its settings: Invalid momentum value: -0.9"
    refused(UsageError, moment, lambda: client.init("w", ONES, lr=0.1, momentum=-0.9))
    name = "key 'w': servers run the optimizers of torch.optim, and 'Sgd' is none of them;"
    refused(UsageError, name, lambda: client.init("w", ONES, "Sgd", lr=0.1))
    refused(UsageError, "torch.optim.LBFGS cannot run on", lambda: client.init("w", ONES, "LBFGS"))
    kept = "key 'w': dtype 'int64' cannot be on a server; one of float32, float64, float16, bf"
    refused(UsageError, kept, lambda: client.init("w", np.arange(3)))
    refused(UsageError, r"key 'w': .*shape \[0, 2\]", lambda: client.init("w", ONES[:0]))
    refused(UsageError, "array for key 'w' is list, which", lambda: client.init("w", [1.0, 2.0]))
    refused(UsageError, "a key is a text", lambda: client.init(3, ONES))
    for workers in ([], [7]):
        bad = rf"key 'w': workers=\[{'7' * len(workers)}\] must be ranks of this job \(0 to 1\)"
        refused(UsageError, bad, lambda w=workers: client.init("w", ONES, workers=w))
    assert client.keys() == []


def on_pushes(group):
    client = pl.ps.Client("async")
    if pl.rank() == 0:
        client.init("w", ONES, lr=1.0, workers=[0])
    group.barrier()
    if pl.rank() == 1:
        early = r"rank 1 pushes to key 'w' before init\('w', ...\)"
        refused(UsageError, early, lambda: client.push("w", ONES))
        client.init("w", ONES, lr=1.0, workers=[0])
        refused(UsageError, r"key 'w', whose workers are \[0\]", lambda: client.push("w", ONES))
        return
    shape = r"rank 0: key 'w' has shape \[3, 2\], but the gradient has \[2, 3\]"
    refused(ShapeMismatch, shape, lambda: client.push("w", ONES.T))
    for dtype in ("int64", "float64", "float16"):
        wrong = f"key 'w' has dtype float32, but the gradient has {dtype}; convert it"
        refused(ShapeMismatch, wrong, lambda d=dtype: client.push_pull("w", ONES.astype(d)))
        wrong = f"key 'w' has dtype float32, but the output has {dtype}"
        refused(ShapeMismatch, wrong, lambda d=dtype: client.pull("w", out=ONES.astype(d)))
    refused(ShapeMismatch, "dtype float32, but", lambda: client.push("w", ONES.astype(">f4")))
    frozen = ONES.copy()
    frozen.flags.writeable = False
    refused(UsageError, "output for 'w' is read-only", lambda: client.pull("w", out=frozen))
    refused(UsageError, "is float, which is no array", lambda: client.push("w", 1.0))
    refused(UsageError, "lr=-1 must be a number >= 0", lambda: client.configure("w", lr=-1))
    refused(UsageError, "has no setting 'rate'", lambda: client.configure("w", rate=1.0))
    assert client.version("w") == 0
    client.push("w", ONES).wait()
    assert not client.peek("w").wait().any()


@pytest.mark.parametrize("body", [on_keys, on_init, on_pushes])
def test_refusals_name_key_and_remedy_and_change_nothing(body):
    run_ranks(1 if body is on_keys else 2, body, servers=2, hosts=1)


def wrong_paces(group):
    for pace in ("allreduce", "ssp:-1", "ssp:x", "async[nonfinite=skip]", "", 3):
        refused(UsageError, "a client's pace is ps, async, ssp or ssp:3", make(pace))
    refused(UsageError, "a client has no option 'nonfinit'; it has unit, ", make("ps", nonfinit=1))
    client = pl.ps.Client("async", nonfinite="never")
    wrong = "table 'w': nonfinite='never' is unknown; choose one of ignore, raise, skip, quarantine"
    refused(UsageError, wrong, lambda: client.init("w", ONES))


def make(pace, **options):
    return lambda: pl.ps.Client(pace, **options)


def test_a_pace_that_cannot_be_is_refused():
    run_ranks(1, wrong_paces, servers=1)


def without_servers(group):
    words = "paceline.ps.Client needs parameter servers, and this job has none: start it with"
    refused(UsageError, f"{words} `paceline run -n 2 -s 1", make("async"))
    pl.shutdown()
    refused(UsageError, "has not joined a job yet: call paceline.init", make("async"))


def after_the_job(group):
    client = pl.ps.Client("async")
    client.init("w", ONES, lr=1.0)
    subscription = client.subscribe("w")
    pl.shutdown()
    for call in (client.pull, client.version, lambda key: client.push(key, ONES)):
        refused(UsageError, "this client's job is over", lambda call=call: call("w"))
    refused(UsageError, "this client's job is over", client.keys)
    assert subscription.wait() is None
    subscription.close()


def test_a_client_of_a_job_that_is_over_says_so():
    run_ranks(1, after_the_job, servers=1)


def test_servers_and_a_job_are_asked_for():
    run_ranks(1, without_servers)


def alone(_rank) -> None:
    refused(UsageError, "has not joined a job yet: call paceline.init", make("async"))


def test_a_process_without_a_job_is_told(tmp_path):
    (outcome,) = run_processes(alone, [base_environ(str(tmp_path))])
    assert outcome.error is None, outcome


def push_nan(group, pace, policy, count):
    client = pl.ps.Client(pace, nonfinite=policy)
    client.init("w", np.zeros(count, np.float32), lr=1.0)
    group.barrier()
    grad = np.ones(count, np.float32)
    if pl.rank() == 1:
        grad[-1] = np.nan  # in the last server's part only
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            receipt, error = client.push("w", grad).wait(), None
        except NonFiniteGradient as raised:
            receipt, error = None, str(raised)
    group.barrier()
    bad = client.peek("w").wait()
    group.barrier()
    for _ in range(2):  # whatever became of that push, the next ones count
        client.push("w", np.ones(count, np.float32)).wait()
    group.barrier()
    told = [str(warning.message) for warning in caught]
    return receipt, error, told, (bad[0], bad[-1]), client.peek("w").wait()[[0, -1]].tolist()


@pytest.mark.parametrize("count", [6, BIG], ids=["small", "cut"])
@pytest.mark.parametrize(
    ("pace", "policy", "after_bad"),
    [
        ("async", "ignore", None),
        ("async", "raise", -1.0),
        ("async", "skip", -1.0),
        ("async", "quarantine", -1.0),
        ("ps", "raise", 0.0),
        ("ps", "skip", 0.0),
        ("ps", "quarantine", -1.0),
    ],
)
def test_a_push_that_is_not_finite_is_never_applied_by_half(pace, policy, after_bad, count):
    sound, culprit = run_ranks(2, push_nan, pace, policy, count, servers=2)
    if policy == "ignore":
        assert culprit[3][0] == -2.0 and np.isnan(culprit[3][1])
        return
    steps = 2 if pace == "ps" else 4
    for _, _, _, bad, last in (sound, culprit):
        assert bad == (after_bad, after_bad)
        assert last == [after_bad - steps] * 2
    named = re.compile(r"table 'w': a gradient in shard '\[.*\]' is NaN or infinite \(worker 1: w")
    hears = [culprit] if pace == "async" else [sound, culprit]
    for receipt, error, told, _, _ in hears:
        if policy == "raise":
            assert named.search(error) and not told
        else:
            assert error is None and receipt.notice in told[0]
            assert "is NaN or infinite (worker 1: w)" in receipt.notice


def tensors_elsewhere(group):
    client = pl.ps.Client("async")
    client.init("w", torch.zeros(3), lr=1.0)
    wrong = "gradient for key 'w' is a torch.sparse_coo tensor on cpu; the client takes dense CPU"
    with pytest.raises(pl.errors.UnsupportedTensor, match=wrong):
        client.push("w", torch.zeros(3).to_sparse())
    with pytest.raises(pl.errors.UnsupportedTensor, match="tensor on meta"):
        client.push("w", torch.zeros(3, device="meta"))


def test_tensors_that_are_not_dense_cpu_tensors_are_refused():
    run_ranks(1, tensors_elsewhere, servers=1)
