"""Packets that no worker would send: the server refuses them and goes on; and gradients that are
not finite, or become so in a codec, are treated as ever."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

import msgspec
import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.group import Group
from paceline.comm.shared_memory import allocate
from paceline.compress.registry import parse_codec
from paceline.errors import BadFrame, NonFiniteGradient, ShapeMismatch, UsageError
from paceline.ps import messages as m
from paceline.ps.client.items import Item, ItemParam
from paceline.ps.client.remote_table import RemoteTable
from paceline.ps.packing import Packing
from paceline.ps.server.checks import check_table
from paceline.ps.spec import OptimizerSpec, Rule, ShardPiece, ShardSpec, TableSpec
from paceline.runtime import job
from support import run_ranks

SIZE = 5000
SGD = OptimizerSpec("SGD", ({"lr": 1.0},))
changed = msgspec.structs.replace


def packed_table(name: str, codec: str, rule: Rule) -> RemoteTable:
    """Make a table of float32 zeros whose pushes go through a codec."""
    here = job.current()
    engine = here.fabric.engine

    def memory(count: int, dtype: torch.dtype) -> torch.Tensor:
        return allocate(engine, (count,), dtype).zero_()

    grads, params, average = (memory(SIZE, torch.float32) for _ in range(3))
    item = Item(
        "numbers",
        [
            ItemParam("cells", 0, 0, SIZE - 10, (SIZE - 10,)),
            ItemParam("few", 0, SIZE - 10, 10, (10,)),
        ],
        grads,
        params,
        average if rule.aggregate else None,
    )
    packing = Packing(parse_codec(codec), memory, worker=0, num_workers=1)
    table = RemoteTable(here.servers, (0,), name, [item], SGD, rule, packing=packing)
    table.open()
    table.assign(0)
    return table


def wrong_packets(push: m.Push) -> Iterator[tuple[m.Push, type[Exception]]]:
    """Pushes whose packets cannot be, and what they are refused with."""
    for size in (0, 4, push.num_bytes - 4, push.num_bytes + 4, 1 << 40):
        yield changed(push, num_bytes=size), ShapeMismatch
    for codec in ("eval", "none", "randomk:0.1", "powersgd:1", "int8(scales=shared)", "topk:2"):
        yield changed(push, codec=codec), UsageError
    yield changed(push, codec="x" * 100_000), UsageError
    yield changed(push, codec="topk:0.02"), ShapeMismatch  # another one than its length is of
    yield changed(push, codec="topk:0.01(min=100000)"), ShapeMismatch  # which takes nothing
    for table, shard in ((-1, 0), (99, 0), (0, -1), (0, 5)):
        yield changed(push, table=table, shard=shard), UsageError


def abuse(_group: Group, aggregate: bool) -> int:
    rule = Rule(bound=0, aggregate=True) if aggregate else Rule(bound=None)
    table, num_refused = packed_table("abused", "topk:0.01", rule), 0
    [link] = job.current().servers
    packet = table.packets.of(table._shards[0][0])
    table.items[0].grads[:SIZE] = torch.arange(SIZE)
    packet.fill(table.items[0].grads, 1)

    def push_of(seq: int) -> m.Push:
        where = link.locate(packet.payload)
        return m.Push(seq, 0, 0, 1, where, "float32", (), packet.form, packet.contents.num_bytes)

    def refuse(push: m.Push, expected: type[Exception], tensors: list[torch.Tensor]) -> None:
        if aggregate or push.table:
            with pytest.raises(expected):
                link.ask(lambda seq: changed(push, seq=seq), payload=lambda: tensors).wait(60)
            return
        link.tell(lambda seq: changed(push, seq=seq), payload=lambda: tensors)
        with pytest.raises(expected):  # nobody waits for a push: the commit tells
            link.ask(lambda seq: m.Commit(seq, 0, 1)).wait(60)

    for push, expected in wrong_packets(push_of(0)):
        refuse(push, expected, [])
        num_refused += 1
    # Places that are not below the end: the gaps behind the values are all too large.
    good = packet.payload.clone()
    end = 4 * 50
    packet.payload[end : packet.contents.num_bytes - 40] = 255
    refuse(push_of(0), BadFrame, [] if link.is_local else [packet.payload])
    packet.payload.copy_(good)
    if link.is_local:
        where = link.locate(packet.payload)
        for place in (changed(where, offset=where.offset + 2), changed(where, rank=9)):
            refuse(changed(push_of(0), where=place), UsageError, [])
    table.push(0, key=1).wait()
    table.commit(None).wait()
    applied = -table.items[0].params
    expected = torch.zeros(SIZE)
    expected[SIZE - 60 :] = torch.arange(SIZE - 60, SIZE)
    assert torch.equal(applied, expected), "the server goes on as if nothing had been said"
    return num_refused


@pytest.mark.parametrize("hosts", [1, [0, 1]], ids=["one host", "two hosts"])
@pytest.mark.parametrize("aggregate", [True, False], ids=["lockstep", "free"])
def test_packets_that_cannot_be_are_refused(aggregate: bool, hosts: object) -> None:
    assert run_ranks(1, abuse, aggregate, servers=1, hosts=hosts) == [18]


def ask_for_means(_group: Group, codec: str) -> list[tuple[str, bool]]:
    """Return of two pushes the codec that the mean came through, and whether it is the right one.

    The first is packed; the second is not, so that its mean has more in it than is usual.
    """
    rule, found = Rule(bound=0, aggregate=True, mean_codec=codec), list[tuple[str, bool]]()
    table = packed_table("means", codec, rule)
    item = table.items[0]
    for key in (1, None):
        item.grads.copy_(torch.randn(SIZE, generator=torch.Generator().manual_seed(3)))
        [reply] = table.push(0, key=key).wait()
        expected = item.grads.clone()
        if key is not None:
            packet = table.packets.of(table._shards[0][0])
            packet.contents.read(packet.payload, expected)
        is_right = torch.allclose(item.average, expected, rtol=0.02, atol=0.02)
        found.append((reply.codec, is_right))
        before = item.params.clone()
        table.commit(None).wait()
        assert torch.equal(item.params, before - item.average), "what it got is what was applied"
    return found


def test_a_mean_comes_in_a_packet_if_it_is_all_in_it() -> None:
    near = {"servers": 1, "hosts": 1}
    far = {"servers": 1, "hosts": [0, 1]}
    assert run_ranks(1, ask_for_means, "topk:0.01", **far) == [[("topk:0.01", True), ("", True)]]
    assert run_ranks(1, ask_for_means, "int8", **far) == [[("int8", True), ("int8", True)]]
    assert run_ranks(1, ask_for_means, "topk:0.9", **far) == [[("", True), ("", True)]]
    assert run_ranks(1, ask_for_means, "int8", **near) == [[("", True), ("", True)]]


@pytest.mark.parametrize(
    "codec", ["onebit", "eval", "none", "topk:0.01+int8", "int8(feedback=yes)"]
)
def test_a_table_whose_means_cannot_go_through_a_codec_is_not_made(codec: str) -> None:
    shard = ShardSpec("numbers", "float32", 4, (ShardPiece("cells", 0, 0, 0, 4, (4,)),))
    spec = TableSpec("means", (0,), (shard,), SGD, Rule(bound=0, aggregate=True, mean_codec=codec))
    with pytest.raises(UsageError):
        check_table(spec)
    free = Rule(bound=None, mean_codec="int8")
    with pytest.raises(UsageError, match="mean_codec"):
        check_table(changed(spec, rule=free))


def train_with_a_nan(group: Group, paces: list[str]) -> list[tuple[bool, str, torch.Tensor]]:
    """Make three steps; one worker's gradient is NaN in the second. Return by pace whether all
    values are finite, what was said, and the values."""
    found = []
    for pace in paces:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(60, 40), nn.Linear(40, 10))
        made = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = pl.distribute(model, made, pace=pace, bucket_mb=0.005)
        said = ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                x = torch.ones(2, 60)
                if step == 1 and group.rank == 1:
                    x[0, 0] = math.nan
                try:
                    model(x).sum().backward()
                    optimizer.step()
                except NonFiniteGradient as error:
                    said += str(error)
                optimizer.zero_grad()
        group.barrier()
        model.pull()
        said += "; ".join(str(warning.message) for warning in caught)
        values = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        found.append((bool(values.isfinite().all()), said, values))
        group.barrier()
    return found


def test_a_nan_is_kept_out_and_its_worker_is_named() -> None:
    paces = [
        f"{pace}[nonfinite={policy}, compress={codec}]"
        for pace in ("ps", "async")
        for policy in ("raise", "skip", "quarantine")
        for codec in ("int8(min=0)", "onebit(min=0)", "topk:0.1(min=0)")
    ]
    one, other = run_ranks(2, train_with_a_nan, paces, servers=2)
    for pace, (is_finite, said, values), (_, heard, same) in zip(paces, one, other, strict=True):
        assert is_finite and torch.equal(values, same), pace
        hears = said + heard if pace.startswith("ps") else heard
        assert "worker 1: " in hears and "shard" in hears, (pace, hears)


def overflow(_group: Group, pace: str) -> bool:
    """A gradient that is too large for the codec, in the part of one server."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = pl.distribute(model, made, pace=pace, bucket_mb=0.01)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    model[0].weight.register_hook(lambda grad: torch.full_like(grad, 1e6))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    model.pull()
    return torch.equal(nn.utils.parameters_to_vector(model.parameters()), before)


@pytest.mark.parametrize("pace", ["ps", "async"])
def test_a_number_too_large_for_a_codec_keeps_all_servers_from_their_part(pace: str) -> None:
    pace = f"{pace}[nonfinite=skip, compress=fp16]"
    assert run_ranks(1, overflow, pace, servers=2) == [True]
