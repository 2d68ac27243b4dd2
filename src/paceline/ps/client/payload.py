"""The handle of a tensor that follows a request."""

from __future__ import annotations

from collections.abc import Callable

from paceline import _core, errors


class PayloadHandle:
    """A tensor that follows a request, with errors in terms of servers."""

    def __init__(
        self, work: _core.Work, lost: Callable[[errors.PacelineError], errors.PacelineError]
    ) -> None:
        self._work, self._lost, self.done = work, lost, work.done

    def wait(self, timeout_s: float | None = None) -> None:
        try:
            self._work.wait(timeout_s)
        except errors.PeerError as error:
            if timeout_s is not None and not self._work.done():
                raise  # only this wait has ended
            raise self._lost(error) from error

    def error(self) -> Exception | None:
        error = self._work.error()
        return self._lost(error) if isinstance(error, errors.PacelineError) else error
