"""A profile from traced steps: from the directories of measured runs, or inside a running job.

A traced step of a process that is alone has these marks (observe/record/trace_file.py): input,
"backward" (the first gradient reaches an output), "bucket 3 ready", optimizer, and the step itself.
What is neither input, backward nor optimizer is forward: also the loss, and what the script does
between two steps.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import UsageError
from paceline.observe.telemetry.events import ProgressReport
from paceline.observe.telemetry.file_formats import EventReader
from paceline.observe.telemetry.step_times import StepTimes
from paceline.planner.profile import BucketProfile, ModelProfile

BACKWARD = "backward"  # name of the mark at the start of backward
_READY = re.compile(r"bucket (\d+) ready")
LEAST_STEPS = 3


def timed_steps(directory: Path) -> dict[int, list[StepTimes]]:
    """Return the timed steps of a run so far, by rank."""
    steps: dict[int, list[StepTimes]] = {}
    path = directory / "events.jsonl"
    if path.is_file():
        for line in EventReader(path).lines():
            if isinstance(line.event, ProgressReport):
                steps.setdefault(line.event.rank, []).extend(line.event.steps)
    return steps


def read_measured(
    directories: Sequence[Path], *, name: str, threads: int, process_bytes: int
) -> ModelProfile:
    """Return the mean of all traced steps of all copies; UsageError if there are too few."""
    steps = [step for directory in directories for step in _traced_steps(directory)]
    batches = [
        one.samples
        for directory in directories
        for times in timed_steps(directory).values()
        for one in times
        if one.samples
    ]
    return combine_steps(steps, batches, name=name, threads=threads, process_bytes=process_bytes)


def combine_steps(
    steps: list[dict[str, Any]],
    batches: Sequence[int],
    *,
    name: str,
    threads: int,
    process_bytes: int,
) -> ModelProfile:
    """Return the mean of the parts of some steps; UsageError if there are too few."""
    if len(steps) < LEAST_STEPS:
        raise UsageError(
            f"{name}: {len(steps)} steps were measured, at least {LEAST_STEPS} are needed; let the"
            " script train longer"
        )
    usual = statistics.median_low([step["took_s"] for step in steps])
    # A first batch or a checkpoint must not count as the step of a model.
    steps = [step for step in steps if step["took_s"] <= 3 * usual]
    took = [step["took_s"] for step in steps]
    sizes: Mapping[int, int] = steps[-1]["bytes"]
    if not sum(sizes.values()):
        raise UsageError(
            f"{name}: the steps have no gradients, so there is nothing to exchange; check that the"
            " model given to pl.distribute is the one that is trained"
        )
    buckets = tuple(
        BucketProfile(sizes[at], _mean(step["ready"].get(at, step["backward_s"]) for step in steps))
        for at in sorted(sizes)
    )
    return ModelProfile(
        name=name,
        batch=round(statistics.median(batches)) if batches else 1,
        forward_s=_mean(step["forward_s"] for step in steps),
        backward_s=_mean(step["backward_s"] for step in steps),
        optimizer_s=_mean(step["optimizer_s"] for step in steps),
        input_s=_mean(step["input_s"] for step in steps),
        buckets=buckets,
        cv=_robust_cv(took),
        process_bytes=process_bytes,
        steps=len(steps),
        threads=threads,
    )


def _mean(values: Any) -> float:
    return float(statistics.fmean(values))


def _robust_cv(values: Sequence[float]) -> float:
    """Return the spread relative to the median, from quartiles: one stall must not dominate it."""
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 1.349 / middle


def _traced_steps(directory: Path) -> list[dict[str, Any]]:
    """Return the parts of each traced step, in seconds."""
    path = directory / "trace.json"
    if not path.is_file():
        return []
    events = msgspec.json.decode(path.read_bytes())["traceEvents"]
    by_step: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        step = event.get("args", {}).get("step")
        if step is not None:
            by_step.setdefault(step, []).append(event)
    return [found for events in by_step.values() if (found := step_parts(events)) is not None]


def step_parts(events: list[dict[str, Any]], waits: str = "") -> dict[str, Any] | None:
    """Return the parts of one step; None if it is not complete.

    `waits`: the name of spans in which the process only waited for other workers.
    """
    whole = next((one for one in events if one.get("cat") == "step"), None)
    ready = {}
    sizes = {}
    for one in events:
        found = _READY.fullmatch(one["name"])
        if found is not None:
            ready[int(found[1])] = one["ts"] / 1e6
            sizes[int(found[1])] = int(one["args"]["bytes"])
    if whole is None or not ready:
        return None
    begin_s, took_s = whole["ts"] / 1e6, whole["dur"] / 1e6
    last_s = max(ready.values())
    marks = [one["ts"] / 1e6 for one in events if one["name"] == BACKWARD]
    start_s = min((mark for mark in marks if mark <= min(ready.values())), default=begin_s)
    optimizer_s = sum(one["dur"] / 1e6 for one in events if one["name"] == "optimizer")
    input_s = sum(one["dur"] / 1e6 for one in events if one["name"] == "input")
    backward_s = last_s - start_s
    if waits:
        took_s -= sum(one["dur"] / 1e6 for one in events if one["name"] == waits)
    return {
        "took_s": took_s,
        "backward_s": backward_s,
        "optimizer_s": optimizer_s,
        "input_s": input_s,
        "forward_s": max(0.0, took_s - backward_s - optimizer_s - input_s),
        "ready": {at: at_s - start_s for at, at_s in ready.items()},
        "bytes": sizes,
    }
