"""Synchronous tables: equal to the bit with one process that has the workers' average."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import UsageError
from paceline.ps.server.table import Table
from paceline.ps.spec import Rule
from support import tables as t

SYNC = Rule(bound=0, aggregate=True)
_RATES = ({"lr": 0.1}, {"lr": 0.02})
OPTIMIZERS = {
    "SGD": _RATES,
    "SGD with momentum": (
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"lr": 0.02, "momentum": 0.5, "dampening": 0.1, "weight_decay": 0.0},
    ),
    "SGD foreach": (
        {"lr": 0.1, "foreach": True, "weight_decay": 0.1},
        {"lr": 0.1, "foreach": True},
    ),
    "SGD fused": ({"lr": 0.1, "fused": True, "momentum": 0.9}, {"lr": 0.1, "fused": True}),
    "Adam": ({"lr": 0.1, "betas": (0.8, 0.9)}, {"lr": 0.02, "weight_decay": 0.1, "amsgrad": True}),
    "Adam foreach": ({"lr": 0.1, "foreach": True}, {"lr": 0.02, "foreach": True}),
    "AdamW": ({"lr": 0.1, "weight_decay": 0.3}, {"lr": 0.02, "weight_decay": 0.0}),
    "AdamW fused": ({"lr": 0.1, "fused": True}, {"lr": 0.02, "fused": True, "weight_decay": 0.3}),
    "Adam maximize": ({"lr": 0.1, "maximize": True}, {"lr": 0.02, "maximize": True}),
    **{name: _RATES for name in ("Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam")},
    **{name: _RATES for name in ("RAdam", "RMSprop", "Rprop")},
}


def average(grads: list[torch.Tensor]) -> torch.Tensor:
    """The mean of two is exact in every order."""
    assert len(grads) == 2
    return (grads[0] + grads[1]) * 0.5


def make(optimizer="SGD", groups=_RATES, **options) -> tuple[Table, t.OneProcess]:
    table = t.table(options.pop("rule", SYNC), optimizer, groups, **options)
    t.assign(table, t.noise(1))
    return table, t.OneProcess(t.noise(1), optimizer, groups)


def step_all(table: Table, grads: list[torch.Tensor], settings=None) -> None:
    for worker, grad in enumerate(grads):
        t.push(table, worker, grad)
    for worker in range(len(grads)):
        t.commit(table, worker, settings)


@pytest.mark.parametrize("ranges", [t.WHOLE, t.CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_equals_one_process_to_the_bit(case, ranges):
    table, alone = make(case.split()[0], OPTIMIZERS[case], ranges=ranges)
    for number in range(6):
        grads = [t.noise(10 * number + worker) for worker in (0, 1)]
        step_all(table, grads)
        alone.step(average(grads))
    assert torch.equal(t.read(table, 1), alone.flat)
    assert table.version == 6


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_optimizers_that_need_whole_matrices_get_them(name):
    groups = ({"lr": 0.02}, {"lr": 0.02})
    shape, other = t.SHAPES["first.weight"], t.SHAPES["second.weight"]
    spec = t.table(SYNC, groups=groups).spec
    matrices = [p for s in spec.shards for p in s.pieces if len(p.shape) == 2]
    assert [p.shape for p in matrices] == [shape, other]
    table = t.matrix_table(SYNC, name, groups, matrices)
    params = [torch.nn.Parameter(torch.ones(p.shape)) for p in matrices]
    optimizer = getattr(torch.optim, name)(params, **groups[0])
    for number, piece in enumerate(matrices):
        table.assign(number, torch.ones(piece.count))
    for clock in range(1, 4):
        for number, param in enumerate(params):
            grads = [torch.randn(param.numel()) for _ in (0, 1)]
            for worker in (0, 1):
                table.push(worker, number, clock, grads[worker])
            param.grad = average(grads).view(param.shape)
        table.commit(0, clock)
        table.commit(1, clock)
        optimizer.step()
    for shard, param in zip(table.shards, params, strict=True):
        assert torch.equal(shard.params, param.detach().flatten())


def test_a_scheduler_takes_effect_once_for_all_workers():
    table, alone = make("AdamW")
    for number in range(4):
        grads = [t.noise(10 * number + worker) for worker in (0, 1)]
        rates = ({"lr": 0.1 / (number + 1)}, {"lr": 0.5})
        step_all(table, grads, rates)
        alone.step(average(grads), settings=rates)
    step_all(table, [t.noise(90), t.noise(91)])  # as before
    alone.step(average([t.noise(90), t.noise(91)]))
    assert torch.equal(t.values(table), alone.flat)


def test_parameters_that_nobody_used_are_left_alone():
    table, alone = make("AdamW", ({"lr": 0.1, "weight_decay": 0.1}, {"lr": 0.1}))
    grads = [t.noise(2), t.noise(3)]
    t.push(table, 0, grads[0], absent=(1, 2))
    t.push(table, 1, grads[1], absent=(1,))
    assert table.absent(0) == (1,)
    t.commit(table, 0)
    t.commit(table, 1)
    alone.step(average(grads), absent=(1,))
    assert torch.equal(t.values(table), alone.flat)


def test_the_average_is_shown_and_can_be_replaced():
    table, alone = make()
    grads = [t.noise(2), t.noise(3)]
    t.push(table, 0, grads[0])
    assert not table.is_reduced(0)
    with pytest.raises(UsageError, match="no average to replace"):
        table.replace_average(0, grads[0][:264])
    t.push(table, 1, grads[1])
    assert table.is_reduced(0)
    assert table.shards[0].average is not None
    shown = torch.cat([shard.average for shard in table.shards])
    assert torch.equal(shown, average(grads))
    for number, part in enumerate(t.parts(table, 0.25 * shown)):
        table.replace_average(number, part, absent=(3,))
    # Others may still be looking at it.
    assert torch.equal(torch.cat([shard.average for shard in table.shards]), average(grads))
    t.commit(table, 0)
    t.commit(table, 1)
    alone.step(0.25 * average(grads), absent=(3,))
    assert torch.equal(t.values(table), alone.flat)


def test_nothing_is_applied_before_all_have_committed():
    table, _ = make()
    t.step(table, 0, t.noise(2))
    t.push(table, 1, t.noise(3))
    assert torch.equal(t.values(table), t.noise(1))
    assert table.has_committed(0) and not table.may_read(0) and table.may_read(1)
    t.commit(table, 1)
    assert table.may_read(0) and table.has_committed(0)
    t.read(table, 0)
    assert not table.has_committed(0)
    assert table.outcome(0).version == 1


def test_a_step_that_all_leave_out_is_pushed_again():
    table, alone = make("Adam")
    for worker in (0, 1):
        t.push(table, worker, torch.full((t.NUM_ELEMENTS,), torch.inf))
    assert table.is_reduced(1)
    grads = [t.noise(2), t.noise(3)]
    t.push(table, 0, grads[0])
    assert not table.is_reduced(1)
    t.push(table, 1, grads[1])
    t.commit(table, 0)
    t.commit(table, 1)
    alone.step(average(grads))
    assert torch.equal(t.values(table), alone.flat)


def test_a_step_must_be_left_out_by_all_or_by_none():
    table, _ = make()
    for worker in (0, 1):
        t.push(table, worker, t.noise(worker))
    t.commit(table, 1)
    with pytest.raises(
        UsageError, match=r"worker 0 pushes shard 'part 0'.*workers \[1\] have ended"
    ):
        t.push(table, 0, t.noise(5))


def test_all_workers_must_push_the_same_shards():
    table, _ = make()
    table.push(0, 0, 1, t.noise(2)[:264])
    t.commit(table, 0)
    t.commit(table, 1)
    for worker in (0, 1):
        outcome = table.outcome(worker)
        assert outcome.error == "UsageError"
        assert "workers [1] ended their step without pushing shard 'part 0'" in outcome.text
    assert torch.equal(t.values(table), t.noise(1)) and table.version == 0
    step_all(table, [t.noise(2), t.noise(3)])  # and on they go
    assert table.version == 1 and not table.outcome(0).error


def test_a_step_without_gradients_is_a_step():
    table, _ = make()
    t.commit(table, 0)
    t.commit(table, 1)
    assert torch.equal(t.values(table), t.noise(1))
    assert table.clocks.clock(0) == 1


def test_whoever_leaves_is_not_waited_for():
    table, alone = make(workers=(0, 1, 2))
    grads = [t.noise(2), t.noise(3), t.noise(4)]
    t.step(table, 0, grads[0])
    t.step(table, 2, grads[2])
    table.push(1, 0, 1, grads[1][:264])  # in the average of the first shard: all had pushed it
    assert table.is_reduced(0) and not table.is_reduced(1)
    first = table.shards[0].average.clone()
    table.leave(1)
    table.leave(1)
    assert table.may_read(0) and table.may_read(2) and table.version == 1
    rest = average([grads[0], grads[2]])[264:]
    alone.step(torch.cat([first, rest]))
    assert torch.equal(t.values(table), alone.flat)
    with pytest.raises(UsageError, match="worker 1"):
        table.push(1, 0, 2, grads[1][:264])


def test_an_average_is_known_until_the_next_push():
    table, alone = make(workers=(0, 1, 2))
    grads = [t.noise(2), t.noise(3)]
    for worker in (0, 1):
        t.step(table, worker, grads[worker])
    table.leave(2)  # the average is made and applied at once, and still has to be told
    assert table.version == 1 and table.is_reduced(0) and table.is_reduced(1)
    with pytest.raises(UsageError, match="no average to replace"):
        table.replace_average(0, grads[0][:264])
    table.push(0, 0, 2, grads[0][:264])  # the second shard has no gradient in this step
    assert not table.is_reduced(0)
    table.push(1, 0, 2, grads[1][:264])
    t.commit(table, 0)
    t.commit(table, 1)
    alone.step(average(grads))
    alone.step(average(grads), absent=(2, 3))
    assert torch.equal(t.values(table), alone.flat)


def test_the_half_of_a_worker_that_left_does_not_count():
    table, alone = make(workers=(0, 1, 2))
    grads = [t.noise(2), t.noise(3), t.noise(4)]
    table.push(1, 0, 1, grads[1][:264])
    table.leave(1)
    t.step(table, 0, grads[0])
    t.step(table, 2, grads[2])
    alone.step(average([grads[0], grads[2]]))
    assert torch.equal(t.values(table), alone.flat)


def test_a_narrow_wire_is_averaged_in_the_dtype_of_the_parameters():
    table, alone = make()
    grads = [t.noise(2).bfloat16(), t.noise(3).bfloat16()]
    step_all(table, grads)
    alone.step(average([grad.float() for grad in grads]))
    assert torch.equal(t.values(table), alone.flat)


def test_deltas_and_values_are_averaged_too():
    pushed = [t.noise(2), t.noise(3)]
    deltas, _ = make(rule=Rule(bound=0, aggregate=True, push="delta"))
    step_all(deltas, pushed)
    assert torch.equal(t.values(deltas), t.noise(1) + average(pushed))
    plain, _ = make(rule=Rule(bound=0, aggregate=True, push="params"))
    step_all(plain, pushed)
    assert torch.equal(t.values(plain), average(pushed))


def test_waiting_is_counted_for_whoever_is_late():
    clock = t.Clock()
    table, _ = make(workers=(0, 1, 2), now=clock)
    t.push(table, 0, t.noise(0))
    clock.now_s += 2.0  # worker 0 waits for 1 and 2
    t.push(table, 1, t.noise(1))
    clock.now_s += 4.0  # workers 0 and 1 wait for 2
    assert table.describe_wait([0, 1]) == "worker 2 (table 'model')"
    t.push(table, 2, t.noise(2))
    clock.now_s += 8.0  # they compute
    for worker in (1, 2, 0):
        t.commit(table, worker)
        clock.now_s += 1.0
    waited = {report.worker: report.waited_s for report in table.report().workers}
    assert waited == {0: {1: 1.0, 2: 5.0}, 1: {0: 1.5, 2: 4.5}, 2: {0: 1.0}}


def test_an_optimizer_that_fails_tells_all_workers():
    table, _ = make("Adam", ({"lr": 0.1, "capturable": True}, {"lr": 0.1, "capturable": True}))
    step_all(table, [t.noise(2), t.noise(3)])
    assert table.outcome(0).error == "UsageError"
    assert "torch.optim.Adam failed in step()" in table.outcome(1).text
    assert table.may_read(0) and table.may_read(1)


def test_who_was_asked_to_stop_is_heard_by_all_who_end_the_step() -> None:
    table, _ = make("SGD")
    for clock, asked in ((1, None), (2, 1), (3, None)):
        for worker in (0, 1):
            t.push(table, worker, t.noise(worker))
        for worker in (0, 1):
            table.commit(worker, clock, stops=worker == asked)
        assert [table.outcome(worker).stops for worker in (0, 1)] == [asked is not None] * 2
        for worker in (0, 1):
            t.read(table, worker)


def test_the_wish_of_one_that_is_gone_is_gone_with_it() -> None:
    table, _ = make("SGD")
    for worker in (0, 1):
        t.push(table, worker, t.noise(worker))
    table.commit(1, 1, stops=True)
    table.leave(1)
    table.commit(0, 1)
    assert not table.outcome(0).stops
