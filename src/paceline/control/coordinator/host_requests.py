"""Passes requests about hosts from operators to the launcher, and its answers back.

`paceline hosts add c:4` is for the launcher, which starts agents on hosts. A command only knows the
address of the coordinator, and the launcher is one of its operators.

Threads: everything runs in the coordinator's loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any, Generic, Protocol, TypeVar

from paceline.control import operator_messages as o
from paceline.errors import LaunchError, PacelineError, ProtocolError, UsageError, named


class Operator(Protocol):
    """What is needed of an operator's connection."""

    is_launcher: bool

    def send(self, message: Any) -> None: ...

    def answer(self, request_id: int, value: int | bytes | PacelineError) -> None: ...


Connection = TypeVar("Connection", bound=Operator)


class HostRequests(Generic[Connection]):
    """The requests that the launcher has not answered yet."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        # By number: the operator and its request's id, and the launcher.
        self._pending: dict[int, tuple[Connection, int, Connection]] = {}

    def pass_on(
        self,
        ask: o.ChangeHosts,
        operator: Connection,
        operators: Collection[Connection],
        is_elastic: bool,
    ) -> None:
        """Send a request to the launcher; raises the error with which to answer at once."""
        if ask.action not in o.HOST_ACTIONS:
            raise ProtocolError(
                f"hosts {ask.action[:40]}: expected one of {', '.join(o.HOST_ACTIONS)}; install the"
                " same Paceline version everywhere"
            )
        if not is_elastic:
            raise UsageError(
                "this job is not elastic, so its hosts do not change; start it with --min 1, or see"
                " its hosts with `paceline status`"
            )
        launcher = next((one for one in operators if one.is_launcher), None)
        if launcher is None:
            raise LaunchError(
                "the launcher of this job is not connected to its coordinator; try again in a few"
                " seconds, and check the job with `paceline status`"
            )
        number = next(self._numbers)
        self._pending[number] = operator, ask.id, launcher
        launcher.send(o.HostsWanted(number, ask.action, ask.host))

    def on_answer(self, launcher: Connection, answer: o.HostsChanged) -> None:
        """Pass on the launcher's answer."""
        operator, request_id, asked = self._pending.get(answer.request, (None, 0, None))
        if operator is None or asked is not launcher:
            return  # the operator has left, or this is not the launcher that was asked
        del self._pending[answer.request]
        error = named(answer.error, answer.text) if answer.error else None
        operator.answer(request_id, error or answer.text.encode())

    def on_end(self, gone: Connection) -> None:
        """Forget the requests of an operator that has left, and fail those to a launcher."""
        for number, (operator, request_id, launcher) in list(self._pending.items()):
            if gone in (operator, launcher):
                del self._pending[number]
            if gone is launcher and gone is not operator:
                why = "the launcher of this job has ended before it answered"
                operator.answer(request_id, LaunchError(why))
