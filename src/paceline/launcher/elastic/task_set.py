"""The tasks of an elastic job: replacements that start, losses that are handled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class TaskSet:
    """Tasks that run beside the job; `on_done` is called with the error of each, or None."""

    def __init__(self, on_done: Callable[[BaseException | None], None]) -> None:
        self._on_done = on_done
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_busy(self) -> bool:
        return bool(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine beside the job."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._on_done(None if task.cancelled() else task.exception())

    async def finish(self, within_s: float) -> None:
        """Wait for tasks that are under way; cancel those that take longer."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=within_s)
            for task in late:
                task.cancel()
