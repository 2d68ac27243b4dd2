"""A run: starts the contenders side by side, prints which are missing, and always stops them."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from harness.ranks import ContenderFailed, RankSet


class _Stoppable(Protocol):
    def stop(self) -> None: ...


Ranks = TypeVar("Ranks", bound=_Stoppable)


class Session:
    """The contenders of one part of a benchmark; use it in a `with` statement."""

    def __init__(self) -> None:
        self.scratch = Path(tempfile.mkdtemp(prefix="paceline-bench-"))
        self._started: list[_Stoppable] = []

    def __enter__(self) -> Session:
        # A SIGTERM must run the clean-up as well.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            for ranks in reversed(self._started):
                ranks.stop()
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def start(self, make: Callable[..., Ranks], *arguments: Any) -> Ranks:
        """Start something that will be stopped at the end."""
        ranks = make(*arguments)
        self._started.append(ranks)
        return ranks

    def keep(self, ranks: Sequence[RankSet]) -> None:
        """Take over contenders that were started elsewhere."""
        self._started.extend(ranks)

    def wait_until_ready(self, sets: Sequence[RankSet]) -> dict[str, RankSet]:
        """Return by name those that started; print why the others did not."""
        return {ranks.name: ranks for ranks in sets if _comes_up(ranks)}


def _comes_up(ranks: RankSet) -> bool:
    try:
        ranks.wait_until_ready()
    except ContenderFailed as failure:
        print(f"  {failure}", flush=True)
        return False
    return True
