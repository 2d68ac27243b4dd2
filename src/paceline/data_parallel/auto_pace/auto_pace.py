"""AutoPace: the workers of a model plan its pace, at the start and when hosts or links change.

The first steps are taken at `allreduce`, which is exact and possible in every job; each worker
measures its part of them. Then the workers MEET after a step: they exchange notes, measure the
links between their hosts, and one of them, the OWNER, plans and sends the outcome to all. So all
change the pace after the same step. Later they meet again every few steps and compare notes
(planner/automatic/watch.py).

A meeting is a retryable step (runtime/elastic/session.py): if a worker is lost, the remaining ones
repeat it. A newcomer learns from the others' state when the next meeting is, and at the meeting the
rest. The owner is a worker that remembers the most.

At a free-running pace the workers do not meet: it would make them wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from paceline.comm.group import Group
from paceline.comm.link_probe import measure_links, pairs_of
from paceline.comm.object_collectives import all_gather_object, broadcast_object
from paceline.data_parallel.auto_pace.hosts import WorkerHosts
from paceline.data_parallel.auto_pace.measurement import (
    MEASURED,
    WARM_UP,
    StepSample,
    Window,
    WorkerNote,
    combine_profiles,
    make_note,
)
from paceline.data_parallel.auto_pace.request import AutoRequest
from paceline.data_parallel.training import Training
from paceline.errors import PacelineError, UsageError
from paceline.pace.parse import parse_schedule
from paceline.planner.automatic.budget import lighter, mbit_text, wire_bytes_per_s
from paceline.planner.automatic.decision import Choice, Situation, choose, straggler_among
from paceline.planner.automatic.policy import (
    MEASURED_AT,
    allowed_candidates,
    make_candidate,
)
from paceline.planner.automatic.watch import (
    MEETING_STEPS,
    LinkFound,
    WatchState,
    after_window,
    describe_change,
    links_of,
)
from paceline.planner.candidates import BLOCKED, Candidate
from paceline.planner.cluster import with_links
from paceline.planner.copy_rate import copy_bytes_per_s
from paceline.planner.profile import ModelProfile
from paceline.runtime.console import say, warn
from paceline.runtime.job import Job

_PROBE_S = 1.5  # of one pair of hosts
_COPIED_BYTES = 32 << 20
_TRIES = 2
_OVER = 1.1  # measured traffic above the budget


class _Outcome(msgspec.Struct, frozen=True):
    """The result of a meeting, the same on all workers."""

    state: WatchState
    lines: tuple[str, ...] = ()
    problem: str = ""
    is_again: bool = False  # too few steps were measured


class AutoPace:
    """Plans the pace of one model with the other workers. Main thread only."""

    def __init__(
        self,
        job: Job,
        group: Group,
        request: AutoRequest,
        choose_pace: Callable[[str], Any],  # what a pace means for this model; raises if it cannot
    ) -> None:
        self._job, self._group, self._request = job, group, request
        self._choose = choose_pace
        self._state = WatchState()
        self._profile: ModelProfile | None = None  # of all workers
        self._compute_s: tuple[float, ...] = ()  # of each worker
        self._copy_rate = 0.0
        self._sample: StepSample | None = None
        self._window = Window(job)
        self._num_tries = 0  # to measure
        self.next_step = -1  # after which the workers meet; -1: auto is off
        job.closers.append(self._report_undecided)

    def begin(self, steps: int) -> None:
        """Measure the next steps, and decide after them."""
        if self._sample is None:
            self._sample = StepSample(self._job)
        self._state, self._profile = WatchState(), None
        self._window.restart()
        self.next_step = steps + WARM_UP + MEASURED

    def stop(self) -> None:
        """Leave the pace alone from now on."""
        self.next_step = -1

    def follow_request(self, pace: str, step: int) -> None:
        """Follow an operator who has set the pace after a step: auto begins again, or stops."""
        if parse_schedule(pace).first.is_auto:
            self.begin(step)
        else:
            self.stop()

    def after_step(self, steps: int, training: Training, pace: str) -> str:
        """Meet the other workers if it is time; return the pace to change to, or ""."""
        if self.next_step < 0:
            return ""
        self._window.count()
        if self._sample is not None:
            self._sample.count()
            self._hold_back()
        if steps < self.next_step:
            return ""
        outcome = self._meet(steps, training, pace)
        if outcome.problem:
            self.stop()
            raise UsageError(outcome.problem)
        if outcome.is_again:
            self._measure_again(steps)
            return ""
        self._state = outcome.state
        self._window.restart()
        if self._job.is_first_worker:
            for line in outcome.lines:
                say(f"{self._request.word}: {line}")
        self.next_step = self._next_meeting(steps, outcome.state.pace)
        return "" if outcome.state.pace == pace else outcome.state.pace

    def _measure_again(self, steps: int) -> None:
        """Measure once more; if that fails too, keep the pace."""
        self._num_tries += 1
        if self._num_tries < _TRIES:
            self.begin(steps)
            return
        self.stop()
        if self._job.is_first_worker:
            warn(
                f"{self._request.word}: the steps of this model cannot be measured (no gradients"
                f" arrive in backward), so {MEASURED_AT} stays; choose a pace with --pace"
            )

    def _next_meeting(self, steps: int, pace: str) -> int:
        """Return the step of the next meeting: at the end of a block of local steps."""
        spec = self._choose(pace).pace
        if spec.is_free_running:
            return -1
        every = int(spec.value) if spec.name in BLOCKED else 1
        return steps + every * -(-MEETING_STEPS // every)

    def _hold_back(self) -> None:
        """Keep the first steps within the budget: nothing is known about them yet."""
        if self._request.max_wire is not None:
            self._window.hold_back(self._request.max_wire / self._job.env.local_world_size)

    def _report_undecided(self) -> None:
        if self.next_step >= 0 and not self._state.version and self._job.is_first_worker:
            say(
                f"{self._request.word}: nothing was chosen, because the script took fewer than"
                f" {WARM_UP + MEASURED} steps; the pace did not change"
            )

    # -- meetings -----------------------------------------------------------------------------

    def _meet(self, steps: int, training: Training, pace: str) -> _Outcome:
        own = self._sample.end(training) if self._sample is not None else None
        elastic = self._job.elastic

        def attempt() -> Any:
            with elastic.raising_losses():
                return msgspec.to_builtins(self._attempt(steps, own, pace))

        found = elastic.run_step(attempt)
        self._sample = None
        return msgspec.convert(found, _Outcome)

    def _attempt(self, steps: int, own: ModelProfile | None, pace: str) -> _Outcome:
        group = self._group
        has_profile = self._profile is not None
        note = make_note(self._job, self._window, self._state.version, own, has_profile=has_profile)
        answers = all_gather_object(group, msgspec.to_builtins(note))
        notes = [msgspec.convert(answer, WorkerNote) for answer in answers]
        owner = max(range(len(notes)), key=lambda at: (notes[at].has_profile, notes[at].version))
        state = msgspec.convert(
            broadcast_object(group, msgspec.to_builtins(self._state), owner), WatchState
        )
        is_first = not state.pace
        if is_first and not notes[owner].has_profile:
            measured = [one.profile for one in notes if one.profile is not None]
            if not measured:
                return _Outcome(state, is_again=True)
            self._profile = combine_profiles(measured)
            self._compute_s = tuple(one.compute_s for one in measured)
        return self._decide(steps, notes, owner, state, pace)

    def _decide(
        self, steps: int, notes: Sequence[WorkerNote], owner: int, state: WatchState, pace: str
    ) -> _Outcome:
        hosts = WorkerHosts.of(notes, self._job.fabric.membership)
        is_first = not state.pace
        why, over = "start", ""
        if not is_first:
            step_s = max(one.step_s for one in notes)
            elapsed_s = max(one.elapsed_s for one in notes)
            state, why = after_window(state, hosts.placement, step_s, elapsed_s)
            over = self._describe_excess(hosts.wire_rate)
            if not (why or over) or not state.may_change(steps):
                return _Outcome(state)
        links, took_s = self._probe(hosts)
        change = over or ("" if is_first else describe_change(state, hosts.placement, links))
        state = msgspec.structs.replace(
            state, probe_s=took_s, since_probe_s=0.0, odd_meetings=0, usual_s=0.0
        )
        if not is_first and not change:
            return _Outcome(state)
        candidates = self._candidates(hosts)
        outcome: Any = None
        if self._group.rank == owner:
            found = self._plan(candidates, hosts, links, state, pace, over=bool(over))
            outcome = msgspec.to_builtins(self._outcome(found, state, steps, pace, change))
        decided = msgspec.convert(broadcast_object(self._group, outcome, owner), _Outcome)
        if decided.problem:
            return decided
        return msgspec.structs.replace(
            decided,
            state=msgspec.structs.replace(
                decided.state, placement=hosts.placement, links=tuple(links)
            ),
        )

    def _outcome(
        self, found: Choice | str, state: WatchState, steps: int, pace: str, change: str
    ) -> _Outcome:
        """Return what a plan means: another pace, the same one, or the end of the job."""
        if isinstance(found, str):
            if not state.pace:
                return _Outcome(state, problem=found)
            warn(f"{self._request.word}: {change}; {found}; pace {pace} stays")
            return _Outcome(msgspec.structs.replace(state, pace=pace))
        is_change = bool(state.pace) and found.pace != pace
        now = msgspec.structs.replace(
            state,
            version=state.version + 1,
            pace=found.pace,
            changes=state.changes + is_change,
            changed_at=steps if is_change else state.changed_at,
        )
        verb = "" if not change else f"{change}, so" if is_change else f"{change}, but still"
        lines = found.lines(verb)
        return _Outcome(now, lines=lines if is_change or not change else lines[:1])

    # -- what is there --------------------------------------------------------------------------

    def _describe_excess(self, wire_rate: float) -> str:
        budget = self._request.max_wire
        if budget is None or wire_rate <= budget * _OVER:
            return ""
        return f"a host sent {mbit_text(wire_rate)} of at most {mbit_text(budget)}"

    def _probe(self, hosts: WorkerHosts) -> tuple[list[LinkFound], float]:
        """Measure the links between the hosts; collective. Also returns the time that it took; with
        a budget, the time in which as many bytes may be sent."""
        start_s, sent = time.monotonic(), self._window.wire_bytes
        rows = measure_links(self._group, pairs_of(hosts.first_workers), _PROBE_S)
        names = hosts.names
        at = {rank: name for rank, name in zip(hosts.first_workers, names, strict=True)}
        links = [
            LinkFound(min(at[low], at[high]), max(at[low], at[high]), rate, latency_s, spread)
            for low, high, rate, latency_s, spread in rows
        ]
        took_s = time.monotonic() - start_s
        if self._request.max_wire is not None:
            took_s = max(took_s, (self._window.wire_bytes - sent) / self._request.max_wire)
        return links, took_s

    def _candidates(self, hosts: WorkerHosts) -> list[Candidate]:
        """Return what all workers can run, the pace that was measured first; collective."""
        request, servers = self._request, hosts.servers
        if request.pace is None:
            found = allowed_candidates(
                request.allow,
                servers,
                len(hosts.names),
                has_budget=request.max_wire is not None,
            )
        else:
            found = [make_candidate(str(one), servers) for one in lighter(request.pace)]
        refused = {
            text for texts in all_gather_object(self._group, self._refused(found)) for text in texts
        }
        return [one for one in found if str(one.pace) not in refused]

    def _refused(self, candidates: Sequence[Candidate]) -> list[str]:
        texts = [str(one.pace) for one in candidates]
        return [text for text in texts if self._is_refused(text)]

    def _is_refused(self, pace: str) -> bool:
        try:
            self._choose(pace)
        except PacelineError:
            return True
        return False

    def _plan(
        self,
        candidates: Sequence[Candidate],
        hosts: WorkerHosts,
        links: Sequence[LinkFound],
        state: WatchState,
        pace: str,
        *,
        over: bool,
    ) -> Choice | str:
        """Return the choice; a text: why there is none."""
        assert self._profile is not None, "the owner has a profile"
        if not self._copy_rate:
            self._copy_rate = copy_bytes_per_s(_COPIED_BYTES)
        situation = Situation(
            self._profile,
            with_links(msgspec.structs.replace(hosts.cluster, copy_bytes_per_s=self._copy_rate),
                       links_of(links)),
            straggler_among(self._compute_s),
            hosts.most_on_machine,
            sum(link.spread for link in links) / max(1, len(links)),
            hosts.free_bytes,
        )  # fmt: skip
        request = self._request
        plain = make_candidate(MEASURED_AT, hosts.servers)
        try:
            found = choose(
                plain,
                candidates,
                situation,
                current=pace if state.pace or request.pace is None else "",
                max_wire=request.max_wire,
                wire_factor=self._wire_factor(candidates, situation, hosts, pace) if over else 1.0,
                in_order=request.pace is not None,
                hint=self._hint(),
            )
        except UsageError as error:
            return str(error)
        return found

    def _wire_factor(
        self, candidates: Sequence[Candidate], situation: Situation, hosts: WorkerHosts, pace: str
    ) -> float:
        """Return how much more the current pace sends than predicted."""
        current = next((one for one in candidates if str(one.pace) == pace), None)
        if current is None:
            return 1.0
        predicted = wire_bytes_per_s(situation.predict(current))
        return max(1.0, hosts.wire_rate / predicted) if predicted else 1.0

    def _hint(self) -> str:
        request = self._request
        if request.pace is not None:
            return "; allow more with --max-wire, or choose local:32 or diloco:50"
        more = {"exact": "codecs", "codecs": "local", "stale": "stale+local"}.get(request.allow)
        return f"; --pace auto[allow={more}] allows more" if more else ""
