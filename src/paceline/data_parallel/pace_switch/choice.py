"""Which paces a model is trained at: the script's choice, and what overrides it.

The command line (PACELINE_PACE, PACELINE_PRECISION) overrides the script, and a request of an
operator while the job runs overrides both. With `auto`, or with a budget (PACELINE_MAX_WIRE), the
first steps are taken at allreduce, and the planner chooses after them (auto_pace).

Options that the script gives as keywords, or in brackets, count at every pace that has such an
option.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paceline.compress.codec import make_codec
from paceline.compress.registry import parse_codec
from paceline.data_parallel.amp.mixed_precision import find_problem_with_precision
from paceline.data_parallel.auto_pace.request import AutoRequest, refuse_unplanned
from paceline.data_parallel.checks.model import find_problem_with_servers
from paceline.data_parallel.checks.placement import find_problem_with_devices
from paceline.errors import UsageError
from paceline.options.grammar import Text, number_text
from paceline.options.table import Options, wire_dtype
from paceline.pace.parse import (
    PaceSpec,
    Phase,
    Schedule,
    find_problem_with_backups,
    find_problem_with_codec,
    notices_of,
    parse,
    parse_schedule,
)
from paceline.pace.registry import KNOWN, Pace, find, needs_servers
from paceline.planner.automatic.policy import MEASURED_AT
from paceline.planner.quantities import parse_rate
from paceline.runtime.config import requested_max_wire, requested_pace, requested_precision
from paceline.runtime.console import say
from paceline.runtime.job import Job


@dataclass(frozen=True)
class PhaseOptions:
    """One phase: the step after which it begins, the pace, and its options."""

    start: int
    pace: PaceSpec
    options: Options


class PaceChoice:
    """Chooses for one call of `distribute`, at its start and later."""

    def __init__(self, job: Job, given: Mapping[str, str | float]) -> None:
        self._job = job
        self._given = given
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None
        self._mine = self._asked = Schedule.of(PaceSpec("allreduce"))
        self.request: AutoRequest | None = None  # what the planner has to do

    def at_start(self, pace: str) -> list[PhaseOptions]:
        """Combine the script's pace and arguments with those of the command line, which win."""
        self._mine, requested = parse_schedule(pace), requested_pace()
        asked = self._asked = self._mine if requested is None else parse_schedule(requested)
        is_first = self._job.env.rank == 0
        if requested is not None and is_first and str(asked) != str(self._mine):
            say(f"pace {asked} from the command line instead of the script's {self._mine}")
        if asked == self._mine and len(asked.phases) > 1:
            self._refuse_unknown_options(asked)
        budget = requested_max_wire()
        max_wire = None if budget is None else parse_rate(budget, "--max-wire")
        if asked.first.is_auto or max_wire is not None:
            asked = self._begin_planned(asked, max_wire)
        phases = [self._choose(phase, asked) for phase in asked.phases]
        if self._job.servers and not asked.uses_servers and asked.why_no_servers:
            raise UsageError(
                f"pace {asked} uses no parameter servers{asked.why_no_servers}, and this job has"
                " some: start it without -s, or choose another pace"
            )
        if self._job.elastic.is_on and len(phases) > 1:
            _refuse_free_running(asked)
        for notice in notices_of(pace if requested is None else requested) if is_first else ():
            say(notice)
        return phases

    def find_problem(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, phases: Sequence[PhaseOptions]
    ) -> str | None:
        """Return why these two cannot be trained at one of the paces, or None. From now on
        `while_running` is about them."""
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)
        found = (self._problem_with(phase.pace, phase.options) for phase in phases)
        return next((problem for problem in found if problem is not None), None)

    def while_running(self, pace: str) -> PhaseOptions:
        """Return what another pace means for this model; UsageError if it cannot be used."""
        asked = parse_schedule(pace)
        if len(asked.phases) > 1:
            raise UsageError(
                f"pace={pace}: a running job takes one pace at a time, not a schedule; set the next"
                " one when it is time"
            )
        if asked.first.is_auto:
            asked = self._begin_again(asked)
        if self._job.elastic.is_on:
            _refuse_free_running(asked)
            _refuse_free_running(self._asked)
        chosen = self._choose(asked.phases[0], asked)
        problem = self._problem_with(chosen.pace, chosen.options)
        if problem is not None:
            raise UsageError(problem)
        return chosen

    def _begin_planned(self, asked: Schedule, max_wire: float | None) -> Schedule:
        """Let the planner choose; return the pace of the first steps."""
        refuse_unplanned(asked, self._given, self._job, is_own=self._mine == asked)
        if asked.first.is_auto:
            self.request = AutoRequest(asked.first.options.get("allow", "codecs"), None, max_wire)
        else:
            chosen = self._choose(asked.phases[0], asked)  # which raises if it cannot be
            codec = chosen.options.own.get("compress", chosen.options.compress)
            options = {**({"compress": codec} if parse_codec(codec).is_on else {})}
            pace = asked.first
            given = PaceSpec(pace.name, pace.number, {**options, **pace.options})
            self.request = AutoRequest("", given, max_wire)
        if self._job.world.size == 1 and not self._job.elastic.is_on:
            self.request = None
            return Schedule.of(parse(MEASURED_AT)) if asked.first.is_auto else asked
        is_plain = asked.first.name == MEASURED_AT
        return asked if is_plain else Schedule.of(parse(MEASURED_AT))

    def _begin_again(self, asked: Schedule) -> Schedule:
        """Let the planner choose again; return the pace of the next steps."""
        if self._asked.first != asked.first and str(asked) != "auto" or self.request is None:
            raise UsageError(
                f"pace={asked}: this job began with {self._asked}; start it with --pace {asked}, or"
                " set the pace that you want"
            )
        return Schedule.of(parse(MEASURED_AT))

    def _choose(self, phase: Phase, asked: Schedule) -> PhaseOptions:
        full, given = self._complete(phase.pace, asked)
        chosen = PhaseOptions(phase.start, phase.pace, options_of(full, given))
        self._check(full, chosen.options)
        return chosen

    def _complete(
        self, pace: PaceSpec, asked: Schedule
    ) -> tuple[PaceSpec, Mapping[str, str | float]]:
        """Return a pace with the options that the script wrote, and the keywords that apply."""
        mine, given = self._mine, self._given
        same = [phase.pace for phase in mine.phases if phase.pace.name == pace.name]
        written = (same[0] if same else mine.first).options
        if len(asked.phases) > 1 or asked.first.name != mine.first.name:
            given = {key: value for key, value in given.items() if _fits(pace, key, value)}
            written = {key: value for key, value in written.items() if _fits(pace, key, value)}
        requested = requested_precision()
        if requested is not None:  # it overrides the option, wherever that was given
            given = {**given, "precision": requested}
            written = {key: value for key, value in written.items() if key != "precision"}
            options = {key: value for key, value in pace.options.items() if key != "precision"}
            pace = PaceSpec(pace.name, pace.number, options)
        return PaceSpec(pace.name, pace.number, {**written, **pace.options}), given

    def _refuse_unknown_options(self, schedule: Schedule) -> None:
        rows = [_row(phase.pace) for phase in schedule.phases]
        for name in self._given:
            if not any(row.option(name) for row in rows):
                raise UsageError(f"none of the paces of {schedule} has an option {name!r}")

    def _check(self, pace: PaceSpec, options: Options) -> None:
        job = self._job
        if pace.needs_servers and not job.servers:
            _do_without_servers(job, pace)
        problem = find_problem_with_backups(pace, *self._numbers)
        if problem and job.servers:
            raise UsageError(problem)
        pushed = {"compress": options.compress, "push": options.push}
        problem = find_problem_with_codec(pace, pushed)
        if problem:
            raise UsageError(problem)
        _refuse_apart(job, pace)
        if job.elastic.is_on:
            _refuse_in_elastic_jobs(options)
            if job.part_suffix:
                _refuse_in_units(pace, options)

    @property
    def _numbers(self) -> tuple[int, int]:
        """Return the number of workers and servers; in an elastic job, where both change and a
        table may lie on one partition: the workers at the start, and one server."""
        job = self._job
        if job.elastic.is_on:
            return job.env.world_size, min(len(job.servers), 1)
        return job.world.size, len(job.servers)

    def _problem_with(self, pace: PaceSpec, options: Options) -> str | None:
        codec = parse_codec(options.own.get("compress", options.compress))
        optimizer = self._optimizer()
        if codec.is_on and optimizer is not None:
            problem = make_codec(codec).find_problem(optimizer)
            if problem:
                return problem
        return self._problem_with_model(pace, options)

    def _problem_with_model(self, pace: PaceSpec, options: Options) -> str | None:
        model, optimizer = self._model(), self._optimizer()
        if model is None or optimizer is None:
            return None
        problem = find_problem_with_precision(model, options.precision)
        problem = problem or find_problem_with_devices(
            model, self._job.device, pace, options, is_elastic=self._job.elastic.is_on
        )
        if problem is not None or not (needs_servers(pace.name) and self._job.servers):
            return problem
        return find_problem_with_servers(model, optimizer, options.push)


def options_of(pace: PaceSpec, given: Mapping[str, object]) -> Options:
    """Return the options from the keywords of a script and the text of a pace, which wins."""
    row = _row(pace)
    written = {**{name: _checked(row, pace, name, given[name]) for name in given}, **pace.options}
    chosen = {one.name: one.default_text for one in row.options} | written
    if row.option("wire") and "wire" not in written:
        chosen["wire"] = wire_dtype(str(chosen["precision"]))
    texts = {name: text for name, text in chosen.items() if text is not None}
    fields = set(Options.__struct_fields__) - {"own"}
    values = {one.name: one.value_of(texts[one.name]) for one in row.options if one.name in texts}
    # A method gets its own options, even if another pace has an option of the same name.
    own = {name: text for name, text in texts.items() if row.method or name not in fields}
    return Options(
        own=own,
        **{name: value for name, value in values.items() if name in fields},  # type: ignore[arg-type]
    )


def _row(pace: PaceSpec) -> Pace:
    row = find(pace.name)
    assert row is not None, "a parsed pace is known"
    return row


def _checked(row: Pace, pace: PaceSpec, name: str, value: object) -> str:
    """Return a keyword's value as text; UsageError for an option that the pace does not have."""
    option = row.option(name)
    if option is None:
        others = [other for other, one in KNOWN.items() if one.option(name)]
        where = f"; it belongs to {', '.join(others)}" if others else ""
        names = ", ".join(one.name for one in row.options)
        raise UsageError(f"pace {pace.name} has no option {name!r}{where}; its options: {names}")
    if isinstance(option.kind, Text):
        return option.kind.read(value)
    problem = option.find_problem(value)
    if problem:
        raise UsageError(problem)
    return number_text(float(value)) if isinstance(value, int | float) else str(value)


def _fits(pace: PaceSpec, name: str, value: object) -> bool:
    """Return whether a pace has an option that can have this value."""
    option = _row(pace).option(name)
    return option is not None and (not isinstance(option.kind, tuple) or value in option.kind)


def _refuse_free_running(asked: Schedule) -> None:
    for phase in asked.phases:
        if phase.pace.is_free_running or phase.pace.name == "backup":
            raise UsageError(
                f"the pace of an elastic job cannot change from or to {phase.pace}, where workers"
                " take different numbers of steps; change among paces in lockstep (allreduce, ps,"
                " local, diloco ...), or start the job without --min, --max and --on-loss"
            )


def _refuse_apart(job: Job, pace: PaceSpec) -> None:
    """Raise for a pace that shares memory if the workers are on several hosts."""
    row = find(pace.name)
    if row is None or not row.on_one_host:
        return
    members = job.fabric.membership
    hosts = {members.member(rank).host_id for rank in members.workers}
    if job.elastic.is_joining and hosts != {job.env.host_id}:
        job.elastic.exit_for_replacement(
            f"pace {pace}: workers share memory, so a newcomer must be on their host"
        )
    if len(hosts) > 1:
        raise UsageError(
            f"pace {pace}: its workers share memory, but they are on {len(hosts)} hosts; start them"
            " on one, or use async with servers (-s 1 --pace async)"
        )


def _refuse_in_units(pace: PaceSpec, options: Options) -> None:
    """Raise for paces at which a newcomer's shards would be of different steps."""
    if options.update == "sharded":
        raise UsageError(
            "update=sharded cannot be used in an elastic job on a mesh: workers that share memory"
            " would have to be lost and replaced together with their units; use update=replicated"
            " (or auto), or start the job without --min, --max and --on-loss"
        )
    if pace.is_free_running or pace.name == "backup":
        raise UsageError(
            f"pace {pace} in an elastic job with a sharded model: workers take different numbers of"
            " steps, and a replacement would get shards that do not belong together; use a pace"
            " in lockstep (allreduce, ps, local, diloco ...), or start the job without --min, --max"
            " and --on-loss"
        )


def _refuse_in_elastic_jobs(options: Options) -> None:
    """Raise for options that cannot continue after a worker is lost."""
    if options.batchnorm == "global":
        raise UsageError(
            "batchnorm=global cannot be used in an elastic job: its exchange is in the middle of"
            " forward, which cannot be repeated when a worker is lost; use batchnorm=local, or"
            " start the job without --min, --max and --on-loss"
        )


def _do_without_servers(job: Job, asked: PaceSpec) -> None:
    """Allow a single worker to train without servers: any pace is then a plain step."""
    if job.world.size > 1:
        raise UsageError(
            f"pace {asked} needs parameter servers, and this job has none: start it with"
            f" `paceline run -n {job.world.size} -s 1 --pace {asked.name} ...` (or -s colocated)"
        )
    say(f"pace {asked}: one worker and no servers, so the optimizer runs here, step by step")
