"""Updates grain by grain give what one optimizer over the whole shard gives."""

import pytest
import torch

from paceline.ps.server import optimizer as blocks
from paceline.ps.server.optimizer import ShardOptimizer
from paceline.ps.spec import OptimizerSpec, ShardPiece

SIZES = ((3, 700), (5,), (40, 50), (1,))
COUNT = 4112  # with a gap behind each parameter, as buckets have


def pieces() -> list[ShardPiece]:
    found, start = [], 0
    for number, shape in enumerate(SIZES):
        count = torch.Size(shape).numel()
        found.append(ShardPiece(f"p{number}", number, number % 2, start, count, shape))
        start += count + 2
    return found


def settings(name: str) -> list[dict]:
    plain = {"SGD": {"lr": 0.1, "momentum": 0.9}, "Adam": {"lr": 0.01}, "AdamW": {"lr": 0.01}}
    return [plain[name], {**plain[name], "lr": 0.05, "weight_decay": 0.1}]


def cut(monkeypatch, block_bytes: int) -> None:
    for name in ("_BLOCK_BYTES", "_SGD_BLOCK_BYTES"):
        monkeypatch.setattr(blocks, name, block_bytes)


def run(name: str, steps: int, block_bytes: int, monkeypatch, absent=(), state=None):
    cut(monkeypatch, block_bytes)
    torch.manual_seed(0)
    values = torch.randn(COUNT)
    groups = settings(name)
    optimizer = ShardOptimizer(OptimizerSpec(name, tuple(groups)), pieces(), values)
    if state is not None:
        optimizer.load_state(state)
    done = []
    for _ in range(steps):
        grad = torch.randn(COUNT)
        optimizer.step(grad, absent, groups, 1.0, lambda start, stop: done.append((start, stop)))
    return values, optimizer.state(), done


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
@pytest.mark.parametrize("block_bytes", [256, 1000, 4096])
@pytest.mark.parametrize("absent", [(), (1, 2)])
def test_grains_change_nothing_but_the_order_of_work(name, block_bytes, absent, monkeypatch):
    whole, whole_state, _ = run(name, 4, 1 << 30, monkeypatch, absent)
    grained, grained_state, done = run(name, 4, block_bytes, monkeypatch, absent)
    assert torch.equal(whole, grained)
    assert [(e.piece, e.key) for e in whole_state] == [(e.piece, e.key) for e in grained_state]
    for one, other in zip(whole_state, grained_state, strict=True):
        assert torch.equal(torch.as_tensor(one.value), torch.as_tensor(other.value))
    per_step = len(done) // 4
    assert per_step == -(-COUNT * 4 // block_bytes)
    assert [start for start, _ in done[1:per_step]] == [stop for _, stop in done[: per_step - 1]]


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(threads, monkeypatch):
    one, one_state, _ = run("Adam", 3, 256, monkeypatch)
    blocks.use_threads(threads)
    try:
        several, several_state, done = run("Adam", 3, 256, monkeypatch)
    finally:
        blocks.use_threads(1)
    assert torch.equal(one, several)
    for entry, other in zip(one_state, several_state, strict=True):
        assert torch.equal(torch.as_tensor(entry.value), torch.as_tensor(other.value))
    assert sorted(done[: len(done) // 3]) == sorted(set(done))  # every grain once per step


def test_a_failure_in_any_thread_is_the_callers(monkeypatch):
    blocks.use_threads(2)
    try:
        with pytest.raises(ZeroDivisionError):
            cut(monkeypatch, 256)
            values, groups = torch.randn(COUNT), settings("SGD")
            optimizer = ShardOptimizer(OptimizerSpec("SGD", tuple(groups)), pieces(), values)
            optimizer.step(
                torch.randn(COUNT), (), groups, 1.0, lambda start, _: 1 // (start != 64) and None
            )
    finally:
        blocks.use_threads(1)


def test_state_goes_from_any_grains_to_any_others(monkeypatch):
    _, state, _ = run("Adam", 3, 512, monkeypatch)
    coarse, coarse_state, _ = run("Adam", 2, 1 << 30, monkeypatch, state=state)
    fine, fine_state, _ = run("Adam", 2, 2048, monkeypatch, state=state)
    assert torch.equal(coarse, fine)
    for one, other in zip(coarse_state, fine_state, strict=True):
        assert torch.equal(torch.as_tensor(one.value), torch.as_tensor(other.value))


@pytest.mark.parametrize(
    ("name", "groups"),
    [("Adafactor", [{"lr": 0.01}, {"lr": 0.01}]), ("Adam", [{"lr": 0.1, "fused": True}] * 2)],
)
def test_what_must_stay_whole_is_not_cut(name, groups, monkeypatch):
    cut(monkeypatch, 256)
    values, done = torch.randn(COUNT), []
    optimizer = ShardOptimizer(OptimizerSpec(name, tuple(groups)), pieces(), values)
    optimizer.step(torch.randn(COUNT), (), groups, 1.0, lambda *part: done.append(part))
    assert done == [(0, COUNT)]
