"""A request of a link: what is needed to send it again, and the handle of its reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from paceline import errors
from paceline.ps import messages as m
from paceline.ps.connection import IncomingReply, Into, ServerConnection

if TYPE_CHECKING:
    from paceline.ps.client.link import ServerLink

Make = Callable[[int], m.AnyRequest]
Payload = Callable[[], Sequence[torch.Tensor]]
See = Callable[[m.Reply], None]  # makes visible what a reply names; PeerError: it is gone


def no_tensors(*_: object) -> Sequence[torch.Tensor]:
    """Return the tensors that follow most requests and replies: none."""
    return ()


def nothing(_: m.Reply) -> None:
    """Do nothing: most replies name nothing that has to be made visible."""


class LinkRequest:
    """A request: what is needed to send it again, and the handle of its reply."""

    def __init__(
        self,
        link: ServerLink,
        make: Make,
        payload: Payload,
        into: Into = no_tensors,
        see: See = nothing,
        *,
        has_reply: bool = True,
    ) -> None:
        self.make, self.payload, self.into, self.has_reply = make, payload, into, has_reply
        self.see = see
        self.seq = 0
        self.kind: type[m.AnyRequest] | None = None
        self.connection: ServerConnection | None = None  # that the reply is expected on
        self.incoming: IncomingReply | None = None
        self.reply: m.Reply | None = None
        self._link = link
        self._error: errors.PacelineError | None = None

    @property
    def has_arrived(self) -> bool:
        """Whether the reply has arrived, or its frame has."""
        if self.reply is not None or self.incoming is None:
            return self.reply is not None
        return self.incoming.work.done() and self.incoming.work.error() is None

    def done(self) -> bool:
        if self._error is None and not self.has_arrived:
            try:
                self._link.check(self)
            except errors.PacelineError as error:
                self._error = error
        return self._error is not None or self.has_arrived

    def wait(self, timeout_s: float | None = None) -> None:
        if self.reply is None:
            self._link.wait(self, timeout_s)

    def error(self) -> Exception | None:
        self.done()
        return self._error

    def read(self) -> m.Reply:
        """Return the reply, once it was waited for; raise the error that it carries."""
        assert self.reply is not None, "it was not waited for"
        if self.reply.error:
            raise errors.named(self.reply.error, self.reply.text)
        return self.reply
