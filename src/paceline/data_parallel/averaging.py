"""Which codec averages go over, and which way: worker by worker, or host by host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.collectives.group import Group
from paceline.compress.codec import Allocate
from paceline.compress.parse import CodecSpec, parse_codec
from paceline.data_parallel.bucket import Bucket
from paceline.job import Job
from paceline.options import Options, wire_dtype
from paceline.pace.compressed import CompressedAllReduce, Journeys
from paceline.pace.exchange import Exchange
from paceline.pace.host_first import HostFirst


def compressed_average(
    job: Job,
    group: Group,
    host: Group,
    spec: CodecSpec,
    form: Callable[[str], Group],
    keep: Callable[[Group], None],
    allocate: Allocate,
) -> Exchange:
    """Return how all workers average gradients with a codec.

    `form` makes groups of all workers; other groups are given to `keep`, which closes them.
    """
    books, is_elastic = job.reporter.books, job.elastic.is_on
    leaders = [] if is_elastic else _leaders(job)

    def among_leaders(name: str) -> Group:
        del name
        group = Group(job.fabric, leaders)
        keep(group)
        return group

    if not leaders:
        journeys = Journeys(spec, allocate, group, form, is_elastic=is_elastic)
        books.open(str(spec), journeys.accounts)
        return CompressedAllReduce(group, journeys)
    theirs: Journeys | None = None
    if host.rank == 0:
        first = among_leaders("first hop")
        theirs = Journeys(spec, allocate, first, among_leaders, is_elastic=False)
        books.open(str(spec), theirs.accounts)
    return HostFirst(group, host, len(leaders), spec, theirs, allocate)


def choose_codec(job: Job, options: Options) -> CodecSpec:
    """Return what gradients go over: what was chosen, or what follows from the precision."""
    spec, follows = parse_codec(options.compress), wire_dtype(options.precision)
    if spec.name != "auto" or follows == "fp32" or len(_firsts(job)) == 1:
        return spec
    return CodecSpec(follows)


def left_out(
    exchange: Exchange, buckets: Sequence[Bucket]
) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Return what of gradients has not been sent yet, by parameter."""
    found = [(bucket, exchange.left_out(bucket)) for bucket in buckets]
    return {
        slot.param: slot.place.view(left).clone()
        for bucket, left in found
        if left is not None
        for slot in bucket.slots
    }


def _leaders(job: Job) -> list[int]:
    """The first worker of each host, where some hosts have several; else nobody."""
    firsts = _firsts(job)
    return firsts if 1 < len(firsts) < len(job.fabric.membership.workers) else []


def _firsts(job: Job) -> list[int]:
    membership = job.fabric.membership
    firsts: dict[str, int] = {}
    for rank in membership.workers:
        firsts.setdefault(membership.member(rank).host_id, rank)
    return list(firsts.values())
