"""What one worker measures for the planner: its steps, its machine, its traffic."""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from paceline.data_parallel.training import Training
from paceline.errors import UsageError
from paceline.observe.telemetry.trace import tracer
from paceline.planner.measured_profile import LEAST_STEPS, combine_steps, step_parts
from paceline.planner.profile import BucketProfile, ModelProfile
from paceline.runtime.job import Job
from paceline.runtime.machine import memory, usable_cores

WARM_UP = 3  # steps that are not counted: the first ones allocate memory
MEASURED = 5
_LONGEST_WAIT_S = 3.0  # for a budget, after one step: one that nothing fits is refused soon


class WorkerNote(msgspec.Struct, frozen=True):
    """What a worker tells the others at a meeting."""

    version: int  # of what it remembers
    has_profile: bool
    host: str  # id
    name: str
    machine: str
    cores: int
    free_bytes: int
    step_s: float  # usual step since the last meeting
    elapsed_s: float
    wire_bytes: int  # sent to other hosts since then
    profile: ModelProfile | None = None  # of its first steps


class StepSample:
    """The parts of a worker's steps, from the spans that a trace has."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._spans = tracer.sample(job.steps_done)
        self._steps: list[int] = []  # of this model, as the job counts them
        self._samples = job.reporter.samples

    def count(self) -> None:
        """Count the step that has just been taken."""
        self._steps.append(self._job.steps_done)

    def end(self, training: Training) -> ModelProfile | None:
        """Stop measuring; return the profile, None if there were too few steps."""
        tracer.end_sample(self._spans)
        counted = set(self._steps[WARM_UP:][-MEASURED:])
        by_step: dict[int, list[dict[str, Any]]] = {}
        for span in self._spans:
            if span.step in counted:
                is_whole = span.name == f"step {span.step}"
                event = {"name": span.name, "ts": span.start_s * 1e6, "dur": span.took_s * 1e6}
                event |= {"args": span.args, "cat": "step" if is_whole else ""}
                by_step.setdefault(span.step, []).append(event)
        parts = [
            found for one in by_step.values() if (found := step_parts(one, "wait")) is not None
        ]
        if len(parts) < LEAST_STEPS:
            return None
        batch = (self._job.reporter.samples - self._samples) // max(1, len(self._steps))
        try:
            profile = combine_steps(
                parts,
                [batch] if batch else [],
                name="this model",
                threads=torch.get_num_threads(),
                process_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            )
        except UsageError:  # no gradients: nothing is exchanged, and every pace is the same
            return None
        if training.update.name != "sharded":
            return profile
        shards = self._job.env.local_world_size  # each worker of a host updates its part
        return msgspec.structs.replace(profile, optimizer_s=profile.optimizer_s * shards)


def combine_profiles(profiles: Sequence[ModelProfile]) -> ModelProfile:
    """Return the mean over the workers."""
    first = profiles[0]
    same = [one for one in profiles if len(one.buckets) == len(first.buckets)]

    def mean(field: str) -> float:
        return statistics.fmean(getattr(one, field) for one in same)

    return msgspec.structs.replace(
        first,
        forward_s=mean("forward_s"),
        backward_s=mean("backward_s"),
        optimizer_s=mean("optimizer_s"),
        input_s=mean("input_s"),
        cv=mean("cv"),
        batch=max(1, round(mean("batch"))),
        process_bytes=max(one.process_bytes for one in same),
        buckets=tuple(
            BucketProfile(
                one.num_bytes, statistics.fmean(each.buckets[at].ready_s for each in same)
            )
            for at, one in enumerate(first.buckets)
        ),
    )


class Window:
    """The steps and the traffic of this worker since the last meeting."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.restart()

    def restart(self) -> None:
        """Forget everything; the next step begins now."""
        self._began_s = self._last_s = time.monotonic()
        self._wire = self._sent()
        self._steps_s: list[float] = []

    def count(self) -> None:
        """Count the step that has just been taken."""
        now_s = time.monotonic()
        self._steps_s.append(now_s - self._last_s)
        self._last_s = now_s

    def _sent(self) -> int:
        return self._job.fabric.engine.bytes_sent()[1]

    @property
    def wire_bytes(self) -> int:
        """Bytes sent to other hosts."""
        return self._sent() - self._wire

    @property
    def elapsed_s(self) -> float:
        """Time since the window began."""
        return time.monotonic() - self._began_s

    @property
    def step_s(self) -> float:
        """The usual step; 0 if there was none."""
        return statistics.median(self._steps_s) if self._steps_s else 0.0

    def hold_back(self, bytes_per_s: float) -> None:
        """Wait until what this worker has sent is within a rate."""
        wait_s = self.wire_bytes / bytes_per_s - self.elapsed_s
        if wait_s > 0:
            time.sleep(min(wait_s, _LONGEST_WAIT_S))
            self._last_s = time.monotonic()
            self._job.reporter.begin()  # the next step begins now
            tracer.begin(self._job.steps_done)


def make_note(
    job: Job, window: Window, version: int, profile: ModelProfile | None, *, has_profile: bool
) -> WorkerNote:
    """Return what this worker tells the others."""
    me = job.fabric.membership.member(job.fabric.rank)
    return WorkerNote(
        version,
        has_profile,
        me.host_id,
        me.hostname,
        _boot_id(),
        usable_cores(),
        memory().available_bytes or 0,
        window.step_s,
        window.elapsed_s,
        window.wire_bytes,
        profile,
    )


def _boot_id() -> str:
    """Return an id of the machine: network namespaces of one machine share its cores."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.cpu_count()}"
