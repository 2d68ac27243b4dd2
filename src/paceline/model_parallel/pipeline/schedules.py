"""Schedules: in which order a process computes the microbatches of its stages.

    "gpipe"          all forwards, then all backwards: simple, keeps all activations
    "1f1b"           a backward as soon as one can be done: fewer activations. For the first and the
                     last microbatches, for which the stage before has to wait, the gradients that
                     it waits for are computed and sent before the gradients of weights
    "interleaved:2"  two stages for each process, in turns: a shorter wait at the beginning
    "zero-bubble"    two stages for each process, placed like a V (the first process has the first
                     and the last stage); gradients of weights, for which no process waits, are
                     computed when a process would be idle

The orders of the last two are those of torch.distributed.pipelining. An order has only what is
computed: each action waits for its inputs, and sends its outputs (schedule_runner.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch.distributed import pipelining

from paceline.errors import UsageError

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"
KNOWN = "'gpipe', '1f1b', 'interleaved:2' (or more stages for each process), 'zero-bubble'"


class Action(NamedTuple):
    """One computation of a process."""

    kind: str
    stage: int
    microbatch: int


def stages_per_process(schedule: str) -> int:
    """Return how many stages a schedule needs on each process; UsageError if it is unknown."""
    name, colon, number = schedule.partition(":")
    if name == "interleaved" and not colon:
        return 2
    if name == "interleaved" and number.isascii() and number.isdigit() and int(number) >= 2:
        return int(number)
    if schedule == "zero-bubble":
        return 2
    if schedule in ("gpipe", "1f1b"):
        return 1
    raise UsageError(f"schedule {schedule!r}: choose one of {KNOWN}")


def stages_of_rank(schedule: str, rank: int, num_ranks: int) -> list[int]:
    """Return the stages that a process holds, in the order of the model."""
    if schedule == "zero-bubble":
        return [rank, 2 * num_ranks - 1 - rank]
    return [turn * num_ranks + rank for turn in range(stages_per_process(schedule))]


def stage_ranks(schedule: str, num_ranks: int) -> list[int]:
    """Return the rank that holds each stage."""
    by_stage = {s: r for r in range(num_ranks) for s in stages_of_rank(schedule, r, num_ranks)}
    return [by_stage[stage] for stage in range(len(by_stage))]


def can_run(schedule: str, num_ranks: int, microbatches: int) -> bool:
    """Return whether a schedule is defined for a number of microbatches."""
    if not schedule.startswith("interleaved"):
        return True
    # Microbatches pass through a process's stages in rounds of equal size, of at least one for each
    # process.
    return microbatches % max(1, microbatches // num_ranks) == 0


def choose_microbatches(schedule: str, num_ranks: int, rows: int) -> int:
    """Return the number of microbatches for a batch of so many rows.

    Processes wait for (p - 1) / (m + p - 1) of the time, with p processes and m microbatches: with
    m = 4 p that is below a fifth, and smaller microbatches compute less efficiently. So: the
    largest number up to 4 p that divides the batch.
    """
    return next(
        number
        for number in range(min(rows, 4 * num_ranks), 0, -1)
        if rows % number == 0 and can_run(schedule, num_ranks, number)
    )


@lru_cache
def schedule_actions(
    schedule: str, rank: int, num_ranks: int, microbatches: int
) -> tuple[Action, ...]:
    """Return what a process computes, in order."""
    if not can_run(schedule, num_ranks, microbatches):
        rounds = microbatches // num_ranks
        raise UsageError(
            f"schedule {schedule!r}: {microbatches} microbatches cannot pass through {num_ranks}"
            f" processes in {rounds} rounds of equal size; use microbatches="
            f"{rounds * num_ranks}, or schedule='1f1b', which takes any number"
        )
    if schedule == "gpipe":
        return tuple(_all_then_all(rank, microbatches))
    if schedule == "1f1b":
        return tuple(_one_by_one(rank, num_ranks, microbatches))
    return tuple(_merged(_torch_order(schedule, rank, num_ranks, microbatches)))


def forward_order(indices: Sequence[int], microbatches: int) -> tuple[Action, ...]:
    """Return the order without backward: each stage as early as it can be."""
    return tuple(Action(FORWARD, stage, m) for stage in indices for m in range(microbatches))


def _all_then_all(stage: int, microbatches: int) -> Iterator[Action]:
    for kind in (FORWARD, BACKWARD):
        for microbatch in range(microbatches):
            yield Action(kind, stage, microbatch)


def _one_by_one(stage: int, num_stages: int, microbatches: int) -> Iterator[Action]:
    # A stage is as many microbatches ahead as there are stages after it.
    ahead = min(microbatches, num_stages - 1 - stage)
    for microbatch in range(ahead):
        yield Action(FORWARD, stage, microbatch)
    for microbatch in range(microbatches):
        if microbatch + ahead < microbatches:
            yield Action(FORWARD, stage, microbatch + ahead)
        # The stage before is idle while it waits for the first gradients and for the last ones: it
        # gets those before this stage computes the gradients of its weights.
        if stage > 0 and not num_stages - 1 <= microbatch <= microbatches - num_stages:
            yield Action(BACKWARD_INPUT, stage, microbatch)
            yield Action(BACKWARD_WEIGHT, stage, microbatch)
        else:
            yield Action(BACKWARD, stage, microbatch)


def _torch_order(schedule: str, rank: int, num_ranks: int, microbatches: int) -> Iterator[Action]:
    count = stages_per_process(schedule)
    # All that torch needs of stages to make an order.
    stages: Any = [
        SimpleNamespace(
            stage_index=index,
            num_stages=count * num_ranks,
            group_size=num_ranks,
            group_rank=rank,
            submod=None,
        )
        for index in stages_of_rank(schedule, rank, num_ranks)
    ]
    kind: Any = pipelining.ScheduleInterleaved1F1B
    if schedule == "zero-bubble":
        kind = pipelining.ScheduleZBVZeroBubble
    for action in kind(stages, microbatches).pipeline_order[rank]:
        if action is not None and action.computation_type.value in "FBIW":
            assert action.microbatch_index is not None
            yield Action(action.computation_type.value, action.stage_index, action.microbatch_index)


def _merged(actions: Iterator[Action]) -> Iterator[Action]:
    """Join the two halves of a backward if they follow each other: it costs less."""
    pending: Action | None = None
    for action in actions:
        if pending is not None and action == pending._replace(kind=BACKWARD_WEIGHT):
            yield action._replace(kind=BACKWARD)
            pending = None
            continue
        if pending is not None:
            yield pending
        pending = action if action.kind == BACKWARD_INPUT else None
        if pending is None:
            yield action
    if pending is not None:
        yield pending
