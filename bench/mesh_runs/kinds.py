"""The contenders of each comparison: library, transport and options."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from harness.training_kinds import keep_freed_memory
from torch.optim import Optimizer

from mesh_runs import by_hand
from mesh_runs.by_hand import Step
from mesh_runs.models import SIZES, Batch, Gpt, text_loss, texts


@dataclass(frozen=True)
class Kind:
    """One contender; a mesh is of ours, anything else is by hand."""

    label: str
    way: str  # "tp", "pp", "fsdp", "dp": what is cut; "alone": the stages of a pipeline; "one"
    backend: str = ""  # of torch.distributed, when it is done by hand
    mesh: str = ""
    options: dict[str, Any] = field(default_factory=dict)  # of pl.distribute
    keeps_memory: bool = False  # as ours does: malloc returns nothing to the kernel

    @property
    def world(self) -> int:
        """How many processes it has."""
        return 1 if self.way == "one" else 2

    @property
    def is_coordinated(self) -> bool:
        """Whether its loss must equal that of the other contenders."""
        return self.way != "alone"

    @property
    def has_own_batches(self) -> bool:
        """Whether each process takes samples of its own."""
        return self.way in ("fsdp", "dp")


_HALVES = {"splits": ["blocks.{middle}"]}

KINDS = {
    "one": Kind("one process, memory kept", "one", keeps_memory=True),
    "tp-gloo": Kind("DTensor by hand, gloo", "tp", "gloo"),
    "tp-gloo-kept": Kind("  with memory kept", "tp", "gloo", keeps_memory=True),
    "tp-paceline": Kind("DTensor by hand, paceline", "tp", "paceline", keeps_memory=True),
    "tp-ours": Kind("paceline tp=2", "tp", mesh="tp=2"),
    "pp-gloo": Kind("pipelining by hand, gloo", "pp", "gloo"),
    "pp-gloo-kept": Kind("  with memory kept", "pp", "gloo", keeps_memory=True),
    "pp-paceline": Kind("pipelining by hand, paceline", "pp", "paceline", keeps_memory=True),
    "pp-ours": Kind("paceline 1f1b", "pp", mesh="pp=2", options={"schedule": "1f1b", **_HALVES}),
    "pp-ours-zero": Kind(
        "paceline zero-bubble", "pp", mesh="pp=2", options={"schedule": "zero-bubble"}
    ),
    "pp-ours-interleaved": Kind(
        "paceline interleaved:2", "pp", mesh="pp=2", options={"schedule": "interleaved:2"}
    ),
    "alone": Kind("stages alone", "alone"),
    "alone-kept": Kind("  with memory kept", "alone", keeps_memory=True),
    "fsdp-gloo": Kind("fully_shard, gloo", "fsdp", "gloo"),
    "fsdp-gloo-kept": Kind("  with memory kept", "fsdp", "gloo", keeps_memory=True),
    "fsdp-ours": Kind("paceline fsdp=2", "fsdp", mesh="fsdp=2"),
    "dp-gloo": Kind("DDP, gloo", "dp", "gloo"),
    "dp-ours": Kind("paceline dp=2", "dp", mesh="dp=2"),
}


@dataclass(frozen=True)
class Place:
    """Which process this is, and what all of them train."""

    rank: int
    world: int
    model: str
    microbatches: int

    @classmethod
    def of_environment(cls) -> Place:
        env = os.environ
        place = (int(env["RANK"]), int(env["WORLD_SIZE"]))
        return cls(*place, env["BENCH_MODEL"], int(env["BENCH_MICROBATCHES"]))


def build(kind: Kind, place: Place) -> tuple[Step, Optimizer]:
    """Join the other ranks and train the same model with them."""
    if kind.keeps_memory:
        keep_freed_memory()
    if kind.backend:
        _join_torch(kind.backend, place)
    torch.manual_seed(1)  # the same model everywhere
    model = SIZES[place.model].make()
    if kind.mesh:
        return _ours(kind, model, place)
    if kind.way == "one":
        optimizer = by_hand.adamw(list(model.parameters()))
        return by_hand.plain(model, optimizer), optimizer
    if kind.way == "tp":
        return by_hand.tensor_parallel(model)
    if kind.way == "pp":
        return by_hand.pipeline(model, place.microbatches)
    if kind.way == "alone":
        return by_hand.stage_alone(model, place.rank, place.microbatches)
    return by_hand.sharded(model) if kind.way == "fsdp" else by_hand.replicated(model)


def _join_torch(backend: str, place: Place) -> None:
    import torch.distributed as dist

    if backend == "paceline":
        import paceline  # noqa: F401  # registers its backend
    # A FileStore, because torch's TCPStore would listen on all interfaces.
    store = dist.FileStore(os.environ["BENCH_STORE"], place.world)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world)


def _ours(kind: Kind, model: Gpt, place: Place) -> tuple[Step, Optimizer]:
    import paceline as pl

    pl.init()
    optimizer = by_hand.adamw(list(model.parameters()))
    options = dict(kind.options)
    if splits := options.get("splits"):
        middle = len(model.blocks) // 2
        options["splits"] = [name.format(middle=middle) for name in splits]
    if kind.way == "pp":
        # What a stage sends is measured with a microbatch.
        example = texts(2 * place.microbatches, seed=0)[0]
        options |= {"microbatches": place.microbatches, "example": (example,)}
    model, optimizer = pl.distribute(model, optimizer, mesh=kind.mesh, loss=text_loss, **options)

    def step(batch: Batch) -> float:
        loss = model.train_step(*batch)
        return float(loss) if loss is not None else math.nan

    return step, optimizer
