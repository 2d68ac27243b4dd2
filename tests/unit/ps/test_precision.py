"""Servers that keep parameters in another precision than the workers."""

from __future__ import annotations

import pytest
import torch

from paceline.ps.server.precision import round_stochastically, seed_of
from paceline.ps.server.table import Table
from paceline.ps.spec import Rule
from support import tables as t

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
RATES = ({"lr": 0.1}, {"lr": 0.1})


def make(server_dtype: str, seed: int = 0, optimizer="SGD", **options) -> Table:
    aggregate = options.pop("aggregate", False)
    rule = Rule(0 if aggregate else None, aggregate=aggregate, server_dtype=server_dtype, seed=seed)
    return t.table(rule, optimizer, RATES, ranges=t.CUT, **options)


@pytest.mark.parametrize("aggregate", [True, False])
@pytest.mark.parametrize("server_dtype", NARROW)
def test_updates_smaller_than_a_rounding_step_count_on_average(server_dtype, aggregate):
    # To nearest, 1 - 2^-12 is 1 in both dtypes, and no number of such updates would ever count.
    update, num_seeds = 2.0**-12, 200
    moved = 0.0
    for seed in range(num_seeds):
        table = make(server_dtype, seed, workers=(0,), aggregate=aggregate)
        t.assign(table, torch.ones(t.NUM_ELEMENTS))
        t.step(table, 0, torch.full((t.NUM_ELEMENTS,), 10 * update))
        found = t.values(table)
        assert found.dtype is NARROW[server_dtype]
        moved += float((1.0 - found.double()).sum())
    count = num_seeds * t.NUM_ELEMENTS
    step = torch.finfo(NARROW[server_dtype]).eps / 2  # between numbers just below one
    chance = update / step
    deviation = step * (chance * (1 - chance) / count) ** 0.5
    assert 0.0 < chance < 1.0
    assert abs(moved / count - update) < 4 * deviation


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_the_same_seed_gives_the_same_bits(optimizer):
    def train(seed: int) -> torch.Tensor:
        table = make("bf16", seed, optimizer)
        t.assign(table, t.noise(1))
        for number in range(5):
            t.step(table, number % 2, t.noise(number))
        return t.values(table)

    assert torch.equal(train(3), train(3))
    assert not torch.equal(train(3), train(4))


@pytest.mark.parametrize("server_dtype", NARROW)
def test_every_shard_is_one_rounding_away_from_float32(server_dtype):
    table, wide = make(server_dtype, optimizer="AdamW"), make("fp32", optimizer="AdamW")
    start = t.noise(1).to(NARROW[server_dtype])
    for one in (table, wide):
        t.assign(one, start)
        t.step(one, 0, t.noise(2))
    eps = torch.finfo(NARROW[server_dtype]).eps
    assert torch.all((t.values(table) - t.values(wide)).abs() <= eps * t.values(wide).abs())
    for number in range(len(table.shards)):  # the optimizer's memory is in float32
        for mine, other in zip(table.state(number), wide.state(number), strict=True):
            assert mine.key == other.key and torch.equal(mine.value, other.value)


def test_compensation_pooling_and_deltas_work_on_narrow_servers():
    for rule in (
        Rule(None, server_dtype="bf16", compensate="dc", dc_lambda=0.5),
        Rule(None, server_dtype="bf16", compensate="dc", softsync=1),
        Rule(None, server_dtype="bf16", push="delta"),
        Rule(None, server_dtype="bf16", push="params"),
    ):
        narrow = t.table(rule, "SGD", RATES, ranges=t.CUT)
        wide = t.table(_fp32(rule), "SGD", RATES, ranges=t.CUT)
        for table in (narrow, wide):
            t.assign(table, t.noise(1).bfloat16())
            for worker in (0, 1):
                t.read(table, worker)
            for worker in (0, 1, 1, 0):
                t.step(table, worker, t.noise(worker, scale=0.5))
        assert narrow.version == wide.version
        torch.testing.assert_close(t.values(narrow).float(), t.values(wide), rtol=0.04, atol=0.04)


def _fp32(rule: Rule) -> Rule:
    import msgspec

    return msgspec.structs.replace(rule, server_dtype="fp32")


def test_half_precision_parameters_have_a_float32_master_copy():
    table = make("fp32", dtype="bfloat16", workers=(0, 1), aggregate=True)
    t.assign(table, t.noise(1).bfloat16())
    assert {shard.params.dtype for shard in table.shards} == {torch.float32}
    assert {shard.average.dtype for shard in table.shards} == {torch.bfloat16}
    grads = [t.noise(2).bfloat16(), t.noise(3).bfloat16()]
    for worker in (0, 1):
        t.push(table, worker, grads[worker])
    for worker in (0, 1):
        t.commit(table, worker)
    mean = torch.cat([shard.average for shard in table.shards]).float()
    torch.testing.assert_close(
        mean, (grads[0].float() + grads[1].float()) / 2, rtol=0.01, atol=0.01
    )
    alone = t.OneProcess(t.noise(1).bfloat16().float(), "SGD", RATES)
    alone.step(mean)
    assert torch.equal(t.values(table), alone.flat)
    assert torch.equal(t.read(table, 0, torch.bfloat16), alone.flat.bfloat16())


def test_double_precision_is_kept():
    table = make("fp32", dtype="float64", workers=(0,))
    t.assign(table, t.noise(1).double())
    t.step(table, 0, t.noise(2).double())
    alone = t.OneProcess(t.noise(1).double(), "SGD", RATES)
    alone.step(t.noise(2).double())
    assert torch.equal(t.values(table), alone.flat)


def test_seeds_differ_between_shards_and_versions():
    seeds = {
        seed_of(seed, label, version) for seed in (0, 1) for label in "ab" for version in (1, 2)
    }
    assert len(seeds) == 8
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_numbers_that_fit_are_not_changed():
    source = torch.tensor([0.0, -1.0, 0.5, 96.0, torch.inf])
    target = torch.empty(5, dtype=torch.bfloat16)
    round_stochastically(source, target, seed=1)
    assert torch.equal(target.float(), source)
