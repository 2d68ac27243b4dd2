"""Changing the pace of a running job: all workers go over to another one behind the same step.

A person wishes for a pace; every worker answers with a step that it will not go beyond before it
hears more, or with a reason against it. The largest of these steps is one that nobody has passed:
behind it all change. Workers answer from their control threads, whatever they compute or wait for
at that moment, so nobody holds up anybody.

The wish is part of the journaled state. A coordinator that is restarted asks again; workers that
come back, and newcomers, are told what was settled last.

Threads: everything runs in the coordinator's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.control.coordinator.member_connections import Audience, Peer
from paceline.control.membership.decisions import Decision, Wish
from paceline.control.membership.roster import Roster
from paceline.control.transport import messages as m
from paceline.errors import PacelineError, RendezvousError, UsageError

Answer = Callable[[int | PacelineError], None]  # the step, or why not


class PaceChange:
    """The wishes of people about the pace of one job, one at a time."""

    def __init__(
        self,
        roster: Roster,
        audience: Audience,
        carry_out: Callable[[Sequence[Decision]], None],
    ) -> None:
        self._roster, self._audience, self._carry_out = roster, audience, carry_out
        self._steps: dict[int, int] = {}  # by rank: not to be passed before it is settled
        self._waiting: list[Answer] = []  # for the wish under way

    def wish(self, text: str, request: int, answer: Answer) -> None:
        """Ask all workers for another pace; `answer` hears the step, or why it cannot be."""
        wish = self._roster.state.wish
        if self._roster.membership is None:
            raise RendezvousError("the job is still forming; set its pace when it trains")
        if wish is not None and wish.request == request:  # asked again after a restart of ours
            if wish.is_settled:
                refused = UsageError(f"pace {text} was refused; ask again to hear why")
                answer(wish.step if wish.step >= 0 else refused)
                return
        else:
            self._settle_waiting(UsageError(f"pace {text} was wished for instead"))
            number = 1 if wish is None else wish.number + 1
            self._write(Wish(number, text, request))
        self._waiting.append(answer)
        self.ask()

    def ask(self) -> None:
        """Ask everybody about the wish that is not settled; also when there are new members."""
        wish = self._roster.state.wish
        self._steps.clear()
        if wish is not None and not wish.is_settled:
            for _, peer in self._audience:
                peer.tell(m.PaceWanted(wish.number, wish.pace))
            self.look()

    def greet(self, peer: Peer) -> None:
        """Tell a member that comes, or comes back, what it may have missed."""
        wish = self._roster.state.wish
        if wish is None:
            return
        if wish.is_settled:
            peer.tell(m.PaceSettled(wish.number, wish.pace, wish.step))
        else:
            peer.tell(m.PaceWanted(wish.number, wish.pace))

    def answered(self, rank: int, answer: m.PaceAnswer) -> None:
        """Take in what a worker says."""
        wish, membership = self._roster.state.wish, self._roster.membership
        if wish is None or wish.is_settled or answer.number != wish.number:
            return
        if membership is None or rank not in membership.workers:
            return  # a newcomer that is not in yet: it is asked again when it is
        if answer.problem:
            self._settle(wish, Wish.REFUSED, UsageError(answer.problem))
            return
        self._steps[rank] = answer.step
        self.look()

    def look(self) -> None:
        """See whether all workers that are there have answered; call when they change."""
        wish, membership = self._roster.state.wish, self._roster.membership
        if wish is None or wish.is_settled or membership is None:
            return
        gone = self._audience.left | self._audience.lost.keys()  # also of a job that is not elastic
        here = [rank for rank in membership.workers if self._roster.is_here(rank)]
        workers = [rank for rank in here if rank not in gone]
        if workers and all(rank in self._steps for rank in workers):
            step = max(self._steps[rank] for rank in workers)
            self._settle(wish, step, step)

    def _settle(self, wish: Wish, step: int, told: int | PacelineError) -> None:
        self._write(Wish(wish.number, wish.pace, wish.request, step))
        for _, peer in self._audience:
            peer.tell(m.PaceSettled(wish.number, wish.pace, step))
        self._settle_waiting(told)

    def _settle_waiting(self, told: int | PacelineError) -> None:
        waiting, self._waiting = self._waiting, []
        for answer in waiting:
            answer(told)

    def _write(self, wish: Wish) -> None:
        self._roster.note(wish)
        self._carry_out(())  # which journals it, before anybody is told
