"""`paceline compare`: runs a script at several paces with equal budgets, and compares them."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.cli.planning.child_job import (
    Child,
    Progress,
    require_script,
    require_training,
    running,
    start_job,
)
from paceline.cli.planning.link_emulation import LinkRoute, PacedHosts
from paceline.cli.planning.shaped_hosts import ShapedHosts
from paceline.cli.planning.simulate import split_paces
from paceline.errors import ConfigError, UsageError
from paceline.observe.report.comparison import comparison_figure, comparison_page
from paceline.observe.report.pace_run import PaceRun, common_loss, known_values, read_pace_run
from paceline.observe.report.page import write
from paceline.observe.telemetry.events import BACKWARD_LOSS
from paceline.pace.parse import PaceSpec, find_problem_with_backups, parse
from paceline.pace.registry import find
from paceline.planner.measured_profile import timed_steps
from paceline.planner.quantities import parse_link, parse_time
from paceline.planner.text_table import text_table
from paceline.runtime.console import say
from paceline.runtime.formatting import data_size, percent, rate, short_duration, short_number
from paceline.runtime.machine import usable_cores
from paceline.runtime.probe_spec import ProbeSpec

LEAST_STEPS = 3
_START_S, _POLL_S = 120.0, 0.1
_SLOW = re.compile(r"(\d+):(\d+(?:\.\d+)?)x?")


class CompareOptions(msgspec.Struct, frozen=True):
    """The options as typed."""

    script: str
    arguments: tuple[str, ...]
    is_module: bool
    paces: str
    num_workers: int
    servers: str | None
    budget: str | None
    steps: int | None
    link: str | None
    emulate: str
    slow: str | None
    value: str | None
    seed: int
    output: Path
    command_line: tuple[str, ...]

    @property
    def name(self) -> str:
        return Path(self.script).name


class _Plan(msgspec.Struct, frozen=True):
    """The options, checked."""

    paces: list[PaceSpec]
    budget_s: float | None
    route: LinkRoute | None
    slow: dict[int, float]


def compare_paces(options: CompareOptions) -> int:
    """Run all paces, print a table, write the figure and the page; 1 if a pace failed."""
    plan = _plan(options)
    scratch = Path(tempfile.mkdtemp(prefix="paceline-compare-"))
    try:
        with contextlib.ExitStack() as undo:
            hosts = None
            if plan.route is not None:
                hosts = plan.route.hosts(options.num_workers, scratch)
                undo.enter_context(hosts)
            runs: list[PaceRun] = []
            count = len(plan.paces)
            for number, pace in enumerate(plan.paces):
                say(f"{pace} ({number + 1} of {count}): {_budget_text(options)}")
                runs.append(_run(options, plan, pace, scratch / str(number), hosts))
                if number == 0 and runs[0].failure:  # it is the script: the others would fail, too
                    raise UsageError(runs[0].failure)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    conditions = _conditions(options, hosts)
    _print(runs, options, conditions)
    options.output.mkdir(parents=True, exist_ok=True)
    write(comparison_figure(runs, conditions), options.output / "compare.svg")
    write(comparison_page(runs, options.name, conditions), options.output / "compare.html")
    sys.stdout.write(f"wrote {options.output / 'compare.html'} and compare.svg beside it\n")
    return 1 if any(one.failure for one in runs) else 0


# -- the options --------------------------------------------------------------------------------


def _plan(options: CompareOptions) -> _Plan:
    require_script(options.script, is_module=options.is_module)
    if options.num_workers < 2:
        raise ConfigError(f"-n {options.num_workers}: paces differ from 2 workers on")
    if options.budget is not None and options.steps is not None:
        raise ConfigError("--budget and --steps: give one of them")
    if options.steps is not None and options.steps < LEAST_STEPS:
        raise ConfigError(f"--steps {options.steps}: compare at least {LEAST_STEPS} steps")
    budget_s = None if options.steps else parse_time(options.budget or "60s", "--budget")
    if budget_s is not None and budget_s <= 0:
        raise ConfigError(f"--budget {options.budget}: nothing is reached in no time; give 60s")
    paces = [parse(text) for text in split_paces(options.paces)]
    twice = [str(one) for at, one in enumerate(paces) if one in paces[:at]]
    if twice:
        raise ConfigError(f"--paces names {twice[0]} twice; give each pace once")
    for pace in paces:
        row = find(pace.name)
        if options.link and row is not None and row.on_one_host:
            raise UsageError(
                f"pace {pace} cannot be compared with --link: its workers share the memory of one"
                " host; leave one of both out"
            )
        problem = find_problem_with_backups(pace, options.num_workers, 1)
        if problem:
            raise UsageError(problem)
    slow = _parse_slow(options.slow, options.num_workers)
    if options.link is None and options.emulate != "auto":
        raise ConfigError(f"--emulate {options.emulate} without --link: there are no links")
    route = None
    if options.link is not None:
        route = LinkRoute(options.emulate, parse_link(options.link), options.command_line)
    return _Plan(paces, budget_s, route, slow)


def _parse_slow(text: str | None, num_workers: int) -> dict[int, float]:
    """Parse "1:4x,2:2x": rank 1 computes 4 times as long."""
    found: dict[int, float] = {}
    for part in text.split(",") if text else ():
        match = _SLOW.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"--slow {part!r}: expected RANK:FACTORx, such as 1:4x")
        worker, factor = int(match[1]), float(match[2])
        if worker >= num_workers:
            raise ConfigError(
                f"--slow {part}: there is no rank {worker}; the ranks are 0 to {num_workers - 1}"
            )
        if factor < 1:
            raise ConfigError(f"--slow {part}: a slow worker takes longer: give at least 1x")
        found[worker] = factor
    return found


def _budget_text(options: CompareOptions) -> str:
    if options.steps:
        return f"{options.steps} steps"
    return short_duration(parse_time(options.budget or "60s", "--budget"))


def _conditions(options: CompareOptions, hosts: ShapedHosts | PacedHosts | None) -> str:
    words = [f"{options.num_workers} workers", f"{_budget_text(options)} each"]
    words += [f"links of {options.link}"] if hosts is not None else []
    words += [f"slow {options.slow}"] if options.slow else []
    words += [f"seed {options.seed}"]
    return ", ".join(words) + (f"; {hosts.text}" if hosts is not None else "")


def _servers(options: CompareOptions, pace: PaceSpec) -> str:
    """Return how many servers a pace gets: one beside each worker if links are the limit."""
    if not pace.needs_servers:
        return "0"
    if pace.name == "backup":
        return "1"
    if options.servers is not None:
        return options.servers
    return "colocated" if options.link else str(max(1, options.num_workers // 4))


# -- one run ------------------------------------------------------------------------------------


def _run(
    options: CompareOptions,
    plan: _Plan,
    pace: PaceSpec,
    directory: Path,
    hosts: ShapedHosts | PacedHosts | None,
) -> PaceRun:
    servers = _servers(options, pace)
    shown = ["-n", str(options.num_workers)]
    shown += ["-s", servers] if servers != "0" else []
    target = [*(["-m"] if options.is_module else []), options.script, *options.arguments]
    words = [*shown, "--threads-per-worker", str(max(1, usable_cores() // options.num_workers))]
    words += ["--pace", str(pace)]
    words += hosts.options if hosts is not None else []
    run = PaceRun(
        _label(pace, servers), shlex.join(["paceline", "run", *shown, "--pace", str(pace), *target])
    )
    run.num_workers = options.num_workers
    probe = ProbeSpec(losses=True, slow=plan.slow, seed=options.seed)
    environ = {"PACELINE_PROBE": probe.text(), **(hosts.environ if hosts is not None else {})}
    prefix = hosts.enter() if hosts is not None else []
    child = start_job([*words, *target], directory, environ=environ, prefix=prefix)
    with running(child):
        _follow(child, directory, plan.budget_s, options, Progress(str(pace)))
        has_ended = child.poll() is not None
    value = options.value or BACKWARD_LOSS
    read_pace_run(run, directory, budget_s=plan.budget_s, most_steps=options.steps, value=value)
    try:
        counted = len(run.steps) // options.num_workers
        require_training(options.name, child, directory, counted, LEAST_STEPS, f"at {pace}")
    except UsageError as error:
        run.failure, run.steps = str(error), []
        return run
    if options.value and run.loss is None:
        names = ", ".join(known_values(directory)) or "none"
        raise UsageError(f"--value {options.value}: the script reports {names}; see pl.report")
    run.ended_s = run.took_s if has_ended else None
    return run


def _label(pace: PaceSpec, servers: str) -> str:
    if servers == "0":
        return str(pace)
    return f"{pace}, {servers} server{'s' * (servers not in ('1', 'colocated'))}"


def _follow(
    child: Child,
    directory: Path,
    budget_s: float | None,
    options: CompareOptions,
    progress: Progress,
) -> None:
    """Wait until the budget is used up, counted from the first step, or the job has ended."""
    begin_s, first_s, last = time.monotonic(), 0.0, (0, 0.0)
    workers = [0]
    while child.poll() is None:
        now_s = time.monotonic()
        # A record grows: it is read again only as long as no step, or not every step, is there.
        if not first_s or budget_s is None:
            steps = timed_steps(directory)
            workers = [len(steps.get(rank, ())) for rank in range(options.num_workers)]
            if max(workers) and not first_s:
                first_s = now_s - max(one.took_s for times in steps.values() for one in times[:1])
            if options.steps is not None and min(workers) >= options.steps:
                return
            if sum(workers) != last[0]:
                last = (sum(workers), now_s)
        if first_s and budget_s is not None and now_s - first_s > budget_s + 0.5:
            return
        if now_s - max(last[1], begin_s) > _START_S and (budget_s is None or not first_s):
            return
        if not first_s:
            progress.show("waiting for the first step")
        elif budget_s is not None:
            progress.show(f"{now_s - first_s:.0f} of {short_duration(budget_s)}")
        else:
            progress.show(f"{min(workers)} of {options.steps} steps")
        time.sleep(_POLL_S)


# -- what is printed ----------------------------------------------------------------------------


def _print(runs: Sequence[PaceRun], options: CompareOptions, conditions: str) -> None:
    good = [one for one in runs if not one.failure]
    shared = common_loss(good)
    unit = "samples/s" if all(one.counts_samples for one in good) else "all steps/s"
    header = ["pace", "loss", "time to common", unit, "steps/s", "sent/step", "waiting", ""]
    rows = []
    for one in good:
        to = None if shared is None else one.time_to(shared)
        early = (
            "" if one.ended_s is None else f"ended by itself after {short_duration(one.ended_s)}"
        )
        rows.append(
            [
                one.label,
                "-" if one.loss is None else short_number(one.loss),
                "-" if to is None else short_duration(to),
                rate(one.samples_per_s),
                rate(one.steps_per_s),
                data_size(one.sent_per_step),
                percent(one.wait_share),
                early,
            ]
        )
    sys.stdout.write(f"{options.name}: {conditions}\n\n")
    sys.stdout.write(text_table(header, rows))
    if shared is not None:
        what = options.value or "the value on which the script calls backward()"
        sys.stdout.write(
            f"\nloss: {what}, mean of the last tenth of a run; common loss"
            f" {short_number(shared)}, which every pace reached\n"
        )
    for one in runs:
        if one.failure:
            sys.stdout.write(f"{one.label} failed: {one.failure}\n")
