"""A client's pace means what the same word means to `pl.distribute`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.options.table import ServerOptions
from paceline.pace.parse import parse
from paceline.ps.client.remote_array import ArraySpec, RemoteArray
from paceline.ps.placement import Placement
from paceline.ps.spec import OptimizerSpec, client_rule, rule_of


@pytest.mark.parametrize("pace", ["ps", "async", "ssp", "ssp:0", "ssp:7"])
@pytest.mark.parametrize("options", [{}, {"unit": "version"}, {"nonfinite": "skip", "seed": 3}])
def test_words_mean_the_same_everywhere(pace, options):
    read = parse(pace)
    assert client_rule(pace, options) == rule_of(
        read.name, int(read.value), ServerOptions(**options)
    )


def parts_of(name: str, optimizer: str, count: int) -> list[Placement]:
    chosen, rule = OptimizerSpec(optimizer, ({"lr": 0.1},)), client_rule("async", {})
    spec = ArraySpec(name, (count,), "float32", (0,), chosen, rule)
    links = [SimpleNamespace(index=index, uses_engine_memory=True) for index in range(4)]
    array = RemoteArray(SimpleNamespace(links=links), spec)
    return [shard.part for shard in array.array_shards]


def test_large_arrays_are_cut_unless_the_optimizer_wants_them_whole():
    cut = parts_of("w", "Adam", 1_000_000)
    assert len({part.server for part in cut}) == len(cut) == 4
    assert (cut[0].start, cut[-1].stop) == (0, 1_000_000)
    assert all(a.stop == b.start for a, b in zip(cut, cut[1:], strict=False))
    assert len(parts_of("w", "Adafactor", 1_000_000)) == 1


def test_small_arrays_are_spread_by_their_names():
    firsts = [parts_of(f"layer {n}", "SGD", 10)[0].server for n in range(400)]
    counts = [firsts.count(server) for server in range(4)]
    assert sum(counts) == 400
    assert max(counts) < 1.5 * min(counts)
