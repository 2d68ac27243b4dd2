"""Requests that cannot be right, reads, and the optimizer's state of tables."""

from __future__ import annotations

import msgspec
import pytest
import torch

from paceline.errors import ShapeMismatch, UnknownKey, UsageError
from paceline.ps.server.optimizer import StateEntry
from paceline.ps.server.table import Table
from paceline.ps.spec import OptimizerSpec, Rule, ShardPiece
from support import tables as t

ASYNC, SYNC = Rule(bound=None), Rule(bound=0, aggregate=True)
RULES = pytest.mark.parametrize("rule", [ASYNC, SYNC], ids=["async", "sync"])


def make(rule: Rule = ASYNC, *arguments, **options) -> Table:
    table = t.table(rule, *arguments, **options)
    t.assign(table, t.noise(1))
    return table


# -- refusals -------------------------------------------------------------------------------------


@RULES
def test_nothing_is_pushed_or_read_before_there_are_values(rule):
    table = t.table(rule)
    assert not table.is_ready
    with pytest.raises(UnknownKey, match="table 'model', shard 'part 0' has no value yet"):
        t.push(table, 0, t.noise(2))
    table.assign(0, torch.ones(264))
    with pytest.raises(UnknownKey, match="shard 'part 1' has no value yet"):
        table.read(0, 1, torch.empty(169))
    assert not table.is_ready
    table.assign(1, torch.ones(169))
    assert table.is_ready


@RULES
@pytest.mark.parametrize(
    ("grad", "found"),
    [
        (torch.ones(263), r"shape \[263\]"),
        (torch.ones(4, 66), r"shape \[4, 66\]"),
        (torch.ones(264, dtype=torch.int64), "dtype torch.int64"),
    ],
)
def test_a_tensor_must_be_of_its_shard(rule, grad, found):
    table = make(rule)
    for call in (
        lambda: table.push(0, 0, 1, grad),
        lambda: table.assign(0, grad),
        lambda: table.read(0, 0, grad),
    ):
        with pytest.raises(
            ShapeMismatch, match=f"table 'model', shard 'part 0' has 264 x float32.*{found}"
        ):
            call()


@RULES
@pytest.mark.parametrize("number", [-1, 2])
def test_a_shard_must_be_there(rule, number):
    table = make(rule)
    for call in (
        lambda: table.push(0, number, 1, torch.ones(1)),
        lambda: table.assign(number, torch.ones(1)),
        lambda: table.read(0, number, torch.ones(1)),
        lambda: table.state(number),
        lambda: table.is_reduced(number),
    ):
        with pytest.raises(UsageError, match=f"has 2 shards on this server.*no shard {number}"):
            call()


@RULES
def test_steps_come_one_after_the_other(rule):
    table = make(rule)
    for clock in (0, 2):
        with pytest.raises(UsageError, match=f"worker 1 wants to push at clock {clock}.*next is 1"):
            t.push(table, 1, t.noise(2), clock=clock)
        with pytest.raises(UsageError, match=f"worker 1 wants to commit at clock {clock}"):
            table.commit(1, clock)
    t.step(table, 1, t.noise(2))
    with pytest.raises(UsageError, match="worker 1 wants to push at clock 1, but its next is 2"):
        table.push(1, 0, 1, t.noise(2)[:264])
    with pytest.raises(UsageError, match="worker 1 wants to commit at clock 1, but its next is 2"):
        table.commit(1, 1)


@RULES
def test_a_worker_must_be_of_the_table(rule):
    table = make(rule)
    for call in (
        lambda: table.push(7, 0, 1, torch.ones(264)),
        lambda: table.commit(7, 1),
        lambda: table.read(7, 0, torch.ones(264)),
    ):
        with pytest.raises(UsageError, match="worker 7"):
            call()
    table.leave(7)


def test_settings_are_of_all_groups():
    table = make()
    with pytest.raises(UsageError, match="'model' has 2 param groups.*settings of 1"):
        t.step(table, 0, t.noise(2), ({"lr": 0.1},))


def test_only_synchronous_tables_average():
    with pytest.raises(UsageError, match="'model' is asynchronous"):
        make(ASYNC).is_reduced(0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("LBFGS", "evaluates the loss several times"),
        ("SparseAdam", "dense gradients"),
        ("Lion", "none of them; use one of ASGD, .*, or --pace allreduce"),
        ("Optimizer", "none of them"),
        ("lr_scheduler", "none of them"),
        ("", "none of them"),
    ],
)
def test_an_optimizer_must_be_one_that_servers_run(name, reason):
    with pytest.raises(UsageError, match=f"table 'model': .*{reason}"):
        t.table(ASYNC, name)


def test_an_optimizer_must_accept_its_settings_and_pieces():
    with pytest.raises(UsageError, match="torch.optim.SGD refuses its settings: Invalid learning"):
        t.table(ASYNC, "SGD", ({"lr": -1.0}, {"lr": 0.1}))
    with pytest.raises(UsageError, match="torch.optim.Muon refuses its settings: .*2D"):
        t.table(ASYNC, "Muon")
    with pytest.raises(UsageError, match="'first.bias' is in param group 1, .* has 1 groups"):
        t.table(ASYNC, "SGD", ({"lr": 1.0},))


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (
            Rule(bound=None, push="weights"),
            "push='weights' is unknown; choose one of grad, delta, params",
        ),
        (
            Rule(bound=None, server_dtype="int8"),
            "server_dtype='int8' is unknown; choose one of fp32, bf16, fp16",
        ),
        (
            Rule(bound=None, nonfinite="zero"),
            "nonfinite='zero' is unknown; choose one of ignore, raise, skip",
        ),
        (Rule(bound=None, max_staleness=-1), "max_staleness=-1 must be a whole number, 0 or more"),
        (Rule(bound=None, dc_lambda=float("nan")), "dc_lambda=nan must be a number, 0 or more"),
        (Rule(bound=None, push="delta", compensate="dc"), "use push=grad"),
        (Rule(bound=0, aggregate=True, softsync=2), "which a synchronous table does not have"),
        (Rule(bound=-1), "bound"),
    ],
)
def test_a_rule_must_make_sense(rule, reason):
    with pytest.raises(UsageError, match=reason):
        t.table(rule)


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        (
            ShardPiece("w", 0, 0, 200, 100, (100,)),
            "has 264 elements, but 'w' is declared as 100 of them",
        ),
        (
            ShardPiece("w", 0, 0, 0, 10, (3, 3)),
            r"10 elements of 'w', which are not of shape \[3, 3\]",
        ),
    ],
)
def test_pieces_must_fit(piece, reason):
    spec = t.table(ASYNC).spec
    shard = msgspec.structs.replace(spec.shards[0], pieces=(piece,))
    with pytest.raises(ShapeMismatch, match=reason):
        Table(msgspec.structs.replace(spec, shards=(shard,)), t.memory, t.Clock())


def test_parameters_must_be_floating_point():
    with pytest.raises(UsageError, match="table 'model': shard 'part 0' is of int64; servers"):
        t.table(ASYNC, dtype="int64")


# -- reads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_values_are_read_in_any_floating_dtype(dtype):
    table = make()
    assert torch.equal(t.read(table, 0, dtype), t.noise(1).to(dtype))


def test_a_worker_that_sees_the_servers_memory_needs_no_copy():
    table = make()
    table.read(0, 0, None)
    table.read(0, 1, table.shards[1].params)
    assert table.clocks.staleness(0) == 0


def test_a_read_of_many_shards_is_one_read():
    table = make()
    table.read(0, 1, None)
    t.step(table, 1, t.noise(2))
    table.read(0, 0, None)  # still the read that began before worker 1's update
    assert table.clocks.staleness(0) == 1
    table.read(0, 1, None)
    assert table.clocks.staleness(0) == 0


def test_values_may_be_assigned_again():
    table = make(SYNC)
    t.assign(table, t.noise(5).double())
    assert torch.equal(t.read(table, 0), t.noise(5))


def test_tables_without_shards_or_pieces_work():
    for shards in ((), (msgspec.structs.replace(t.shards()[0], count=0, pieces=()),)):
        spec = msgspec.structs.replace(t.table(SYNC).spec, shards=shards)
        table = Table(spec, t.memory, t.Clock())
        t.assign(table, torch.empty(0))
        for worker in (0, 1):
            t.push(table, worker, torch.empty(0))
        for worker in (0, 1):
            t.commit(table, worker)
        assert table.version == 1


# -- the optimizer's state ------------------------------------------------------------------------


OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad", "NAdam", "RMSprop")


@pytest.mark.parametrize(
    ("optimizer", "ranges"),
    [(name, ranges) for name in OPTIMIZERS for ranges in (t.WHOLE, t.CUT)]
    + [("Adafactor", t.WHOLE)],
)
def test_state_makes_whole_state_dicts_and_comes_back(optimizer, ranges):
    momentum = {"momentum": 0.9} if optimizer in ("SGD", "RMSprop") else {}
    groups = ({"lr": 0.1, **momentum}, {"lr": 0.02, **momentum})
    table, alone = make(ASYNC, optimizer, groups, ranges=ranges), one_process(optimizer, groups)
    for number in range(3):
        t.step(table, 0, t.noise(number))
        alone.step(t.noise(number))
    whole = gather_state(table)
    expected = {
        name: alone.optimizer.state[param]
        for name, param in zip(t.SHAPES, alone.params, strict=True)
    }
    assert whole.keys() == expected.keys()
    for name in t.SHAPES:
        assert whole[name].keys() == expected[name].keys()
        for key, value in expected[name].items():
            assert torch.equal(torch.as_tensor(whole[name][key]), torch.as_tensor(value)), key
    other = make(ASYNC, optimizer, groups, ranges=ranges)
    t.assign(other, t.values(table))
    for number in range(len(table.shards)):
        other.load_state(number, table.state(number))
    t.step(table, 0, t.noise(9))
    t.step(other, 0, t.noise(9))
    alone.step(t.noise(9))
    assert torch.equal(t.values(table), alone.flat)
    assert torch.equal(t.values(other), alone.flat)


def one_process(optimizer: str, groups) -> t.OneProcess:
    return t.OneProcess(t.noise(1), optimizer, groups)


def gather_state(table: Table) -> dict[str, dict[str, object]]:
    """Put the state together as a worker does: cut tensors are joined, others are shared."""
    whole: dict[str, dict[str, object]] = {}
    for number, shard in enumerate(table.spec.shards):
        for entry in table.state(number):
            piece, state = shard.pieces[entry.piece], whole
            mine = state.setdefault(piece.name, {})
            value = entry.value
            if isinstance(value, torch.Tensor) and value.shape == piece.shape and value.dim():
                before = mine.get(entry.key, torch.empty(0))
                value = torch.cat([before.flatten(), value.flatten()])
                if value.numel() == torch.Size(t.SHAPES[piece.name]).numel():
                    value = value.view(t.SHAPES[piece.name])
            mine[entry.key] = value
    return whole


def test_loaded_state_is_a_copy_and_replaces_all():
    groups = ({"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.9})
    table = make(ASYNC, "SGD", groups)
    t.step(table, 0, t.noise(2))
    assert [entry.piece for entry in table.state(0)] == [0, 1]
    mine = torch.ones(24, dtype=torch.float64)
    table.load_state(0, [StateEntry(1, "momentum_buffer", mine)])
    mine.zero_()
    (entry,) = table.state(0)
    assert entry.piece == 1 and torch.equal(entry.value, torch.ones(24))
    with pytest.raises(UsageError, match="'momentum_buffer' of piece 2.* has 2 pieces"):
        table.load_state(0, [StateEntry(2, "momentum_buffer", mine)])


def test_the_report_names_the_table_and_the_server():
    spec = t.table(ASYNC, groups=({"lr": 1.0}, {"lr": 1.0})).spec
    report = Table(spec, t.memory, t.Clock(), server=3).report()
    assert (report.table, report.server, report.version) == ("model", 3, 0)
    assert [worker.worker for worker in report.workers] == [0, 1]


def test_lists_of_settings_are_tuples_again():
    own = OptimizerSpec(
        "Adam", ({"lr": 0.1, "betas": [0.5, 0.9]}, {"lr": 0.1, "betas": [0.5, 0.9]})
    )
    spec = msgspec.structs.replace(t.table(ASYNC).spec, optimizer=own)
    table = Table(spec, t.memory, t.Clock())
    t.assign(table, t.noise(1))
    t.step(
        table, 0, t.noise(2), ({"lr": 0.1, "betas": [0.6, 0.9]}, {"lr": 0.1, "betas": [0.6, 0.9]})
    )
    alone = one_process(
        "Adam", ({"lr": 0.1, "betas": (0.6, 0.9)}, {"lr": 0.1, "betas": (0.6, 0.9)})
    )
    alone.step(t.noise(2))
    assert torch.equal(t.values(table), alone.flat)
