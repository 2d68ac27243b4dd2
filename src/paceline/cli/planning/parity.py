"""`paceline parity`: the first steps of a job beside one process with the global batch."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from paceline.cli.planning.child_job import (
    Progress,
    require_script,
    require_training,
    running,
    start_job,
)
from paceline.cli.planning.parity_check import Difference, Parity, causes, compare_runs
from paceline.errors import ConfigError, UsageError
from paceline.observe.telemetry.events import TrainingConfigured
from paceline.observe.telemetry.file_formats import EventReader
from paceline.pace.parse import parse
from paceline.planner.candidates import Candidate
from paceline.planner.text_table import text_table
from paceline.runtime.console import say
from paceline.runtime.machine import usable_cores
from paceline.runtime.probe_spec import ProbeSpec

LEAST_STEPS = 3
_START_S, _STEP_S, _POLL_S = 120.0, 60.0, 0.1
_SHOWN = 5


class ParityOptions(msgspec.Struct, frozen=True):
    """The options as typed."""

    script: str
    arguments: tuple[str, ...]
    is_module: bool
    num_workers: int
    steps: int
    pace: str | None
    tolerance: float
    seed: int

    @property
    def name(self) -> str:
        return Path(self.script).name


def check_parity(options: ParityOptions) -> int:
    """Run both, compare, print; return 0 if they are equal within the tolerance, else 1."""
    _check(options)
    scratch = Path(tempfile.mkdtemp(prefix="paceline-parity-"))
    try:
        say(f"one process with the global batch of {options.num_workers} workers")
        _run(options, scratch / "one", 1)
        say(f"{options.num_workers} workers")
        pace = _run(options, scratch / "job", options.num_workers)
        parity = compare_runs(
            scratch / "job" / "record",
            scratch / "one" / "record",
            options.num_workers,
            options.tolerance,
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _print(parity, options, pace)
    return 1 if parity.first else 0


def _check(options: ParityOptions) -> None:
    require_script(options.script, is_module=options.is_module)
    if options.num_workers < 2:
        raise ConfigError(f"-n {options.num_workers}: one process is compared with at least 2")
    if options.steps < LEAST_STEPS:
        raise ConfigError(f"--steps {options.steps}: compare at least {LEAST_STEPS} steps")
    if not options.tolerance >= 0:
        raise ConfigError(f"--tolerance {options.tolerance}: expected a number of at least 0")
    if options.pace is not None:
        _require_exact(options.pace)


def _require_exact(pace: str) -> None:
    if not Candidate(parse(pace)).is_exact:
        raise UsageError(
            f"pace {pace} cannot be compared with one process: only allreduce and ps without a"
            " codec compute what one process computes; measure others with `paceline compare`"
        )


def _run(options: ParityOptions, directory: Path, num_workers: int) -> str:
    """Record the first steps of one job; return its pace."""
    record = directory / "record"
    record.mkdir(parents=True)
    probe = ProbeSpec(
        record=str(record),
        steps=options.steps,
        seed=options.seed,
        stands_for=options.num_workers if num_workers == 1 else 0,
    )
    # The same number of threads: another one adds up in another order.
    threads = max(1, usable_cores() // options.num_workers)
    words = ["-n", str(num_workers), "--threads-per-worker", str(threads)]
    if options.pace is not None:
        words += ["--pace", options.pace]
        words += ["-s", "1"] if parse(options.pace).needs_servers else []
    words += [*(["-m"] if options.is_module else []), options.script, *options.arguments]
    run = directory / "run"
    who = "alone" if num_workers == 1 else f"with {num_workers} workers"
    progress = Progress(f"{options.name} {who}")
    with running(start_job(words, run, environ={"PACELINE_PROBE": probe.text()})) as child:
        begin_s = time.monotonic()
        last, last_s = -1, begin_s
        while child.poll() is None:
            done, now_s = _done(record, num_workers), time.monotonic()
            if done >= options.steps:
                break
            if done != last:
                last, last_s = done, now_s
            if now_s - last_s > (_STEP_S if last > 0 else _START_S):
                break
            progress.show(f"{done} of {options.steps} steps")
            time.sleep(_POLL_S)
    done = _done(record, num_workers)
    require_training(options.name, child, run, done, LEAST_STEPS, who)
    pace = _pace_of(run)
    if options.pace is None and num_workers > 1:
        _require_exact(pace)
    return pace


def _done(record: Path, num_workers: int) -> int:
    """Return how many steps all workers have written."""
    counts = []
    for rank in range(num_workers):
        path = record / f"worker-{rank}.jsonl"
        counts.append(path.read_bytes().count(b"\n") if path.is_file() else 0)
    return min(counts)


def _pace_of(run: Path) -> str:
    for line in EventReader(run / "events.jsonl").lines():
        if isinstance(line.event, TrainingConfigured):
            return line.event.values.get("pace", "allreduce")
    return "allreduce"


# -- what is printed ----------------------------------------------------------------------------


def _print(parity: Parity, options: ParityOptions, pace: str) -> None:
    write = sys.stdout.write
    count, steps = options.num_workers, len(parity.steps)
    samples = f" of {parity.samples[1]} samples" if parity.samples[1] else ""
    write(
        f"{options.name}: {count} workers at {pace} against one process with the global"
        f" batch{samples}, {steps} steps, seed {options.seed}\n\n"
    )
    rows = [
        [str(one.step), _number(one.loss), _number(one.reference)]
        + [_relative(one.worst.get(kind)) for kind in ("gradient", "parameter", "buffer")]
        for one in parity.steps
    ]
    header = ("step", "loss", "of one process", "gradients", "parameters", "buffers")
    write(text_table(header, rows))
    first = parity.first
    if not first:
        ulp = max((one.ulp for one in parity.steps), default=0.0)
        write(f"\nequal within {options.tolerance:g}; at most {ulp:.3g} ulp apart\n")
        return
    write("\n")
    for one in first[:_SHOWN]:
        write(f"{_sentence(one)}\n")
    if len(first) > _SHOWN:
        write(f"and {len(first) - _SHOWN} more differ in this step\n")
    write("".join(f"likely: {one}\n" for one in causes(parity)))


def _sentence(one: Difference) -> str:
    when = "before the first step" if one.step == 0 else f"step {one.step}"
    if one.kind == "workers":
        return f"{when}: {one.text}"
    if one.kind in ("samples", "loss"):
        return f"{when}: the {one.kind} differ{'s' * (one.kind == 'loss')}: {one.text}"
    return f"{when}: {one.kind} {one.name} differs by {one.relative:.2g} ({one.ulp:.3g} ulp)"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _relative(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"
