"""Changing the pace of a running job: all workers change it after the same step.

An operator requests a pace. Every worker answers with a step that it will not pass before it hears
more, or with a reason against the pace. No worker has passed the largest of these steps, so all
change after it. Workers answer from their control threads, whatever they compute or wait for at
that moment, so no worker delays another.

The request is part of the journaled state. A restarted coordinator asks again. Workers that
reconnect, and newcomers, receive the last settled request.

Threads: everything runs in the coordinator's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.control import messages as m
from paceline.control.coordinator.member_connections import MemberConnection, MemberConnections
from paceline.control.membership.roster import Roster
from paceline.control.membership.state import Decision, PaceRequest
from paceline.errors import PacelineError, RendezvousError, UsageError

Answer = Callable[[int | PacelineError], None]  # the step, or why not


class PaceChange:
    """The requests of operators for another pace, one at a time."""

    def __init__(
        self,
        roster: Roster,
        members: MemberConnections,
        carry_out: Callable[[Sequence[Decision]], None],
    ) -> None:
        self._roster, self._members, self._carry_out = roster, members, carry_out
        self._steps: dict[int, int] = {}  # by rank: not to be passed before the request is settled
        self._waiting: list[Answer] = []  # for the request under way

    def request(self, pace: str, request_id: int, answer: Answer) -> None:
        """Ask all workers for another pace; `answer` gets the step, or why it was refused."""
        last = self._roster.state.pace_request
        if self._roster.membership is None:
            raise RendezvousError("the job is still forming; set its pace when it trains")
        if last is not None and last.request == request_id:  # repeated after a restart
            if last.is_settled:
                refused = UsageError(f"pace {pace} was refused; ask again to get the reason")
                answer(last.step if last.step >= 0 else refused)
                return
        else:
            self._answer_waiting(UsageError(f"pace {pace} was requested instead"))
            number = 1 if last is None else last.number + 1
            self._journal(PaceRequest(number, pace, request_id))
        self._waiting.append(answer)
        self.ask()

    def ask(self) -> None:
        """Ask all members about an unsettled request; call this when there are new members."""
        request = self._roster.state.pace_request
        self._steps.clear()
        if request is not None and not request.is_settled:
            for _, connection in self._members:
                connection.send(m.PaceWanted(request.number, request.pace))
            self.check()

    def greet(self, connection: MemberConnection) -> None:
        """Send a member that joins or reconnects the last request, which it may have missed."""
        request = self._roster.state.pace_request
        if request is None:
            return
        if request.is_settled:
            connection.send(m.PaceSettled(request.number, request.pace, request.step))
        else:
            connection.send(m.PaceWanted(request.number, request.pace))

    def answered(self, rank: int, answer: m.PaceAnswer) -> None:
        """Take a worker's answer."""
        request, membership = self._roster.state.pace_request, self._roster.membership
        if request is None or request.is_settled or answer.number != request.number:
            return
        if membership is None or rank not in membership.workers:
            return  # a newcomer that is not admitted yet: it is asked again later
        if answer.problem:
            self._settle(request, PaceRequest.REFUSED, UsageError(answer.problem))
            return
        self._steps[rank] = answer.step
        self.check()

    def check(self) -> None:
        """Settle the request if all present workers have answered; call this when they change."""
        request, membership = self._roster.state.pace_request, self._roster.membership
        if request is None or request.is_settled or membership is None:
            return
        gone = self._members.left | self._members.lost.keys()  # also of a job that is not elastic
        present = [rank for rank in membership.workers if self._roster.is_present(rank)]
        workers = [rank for rank in present if rank not in gone]
        if workers and all(rank in self._steps for rank in workers):
            step = max(self._steps[rank] for rank in workers)
            self._settle(request, step, step)

    def _settle(self, request: PaceRequest, step: int, answer: int | PacelineError) -> None:
        self._journal(PaceRequest(request.number, request.pace, request.request, step))
        for _, connection in self._members:
            connection.send(m.PaceSettled(request.number, request.pace, step))
        self._answer_waiting(answer)

    def _answer_waiting(self, value: int | PacelineError) -> None:
        waiting, self._waiting = self._waiting, []
        for answer in waiting:
            answer(value)

    def _journal(self, request: PaceRequest) -> None:
        self._roster.set_pace_request(request)
        self._carry_out(())  # which journals it, before any member is notified
