"""An asyncio loop in a named background thread, callable from any other thread.

Threads: the thread is a daemon, so that a script that forgets to shut down still ends. `stop`
cancels what runs, closes the loop and joins. Neither `call` nor `stop` may be used from the
thread itself: it would wait for itself.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from paceline.errors import UsageError

T = TypeVar("T")


class LoopThread:
    """Runs the coroutines of one subsystem in one thread."""

    def __init__(self, name: str) -> None:
        """Start the thread; raises OSError if the machine or a limit allows no further thread."""
        self._mu = threading.Lock()
        self._is_stopping = False  # guarded by: _mu; nothing is scheduled once it is set
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # Python hides the kernel's EAGAIN
            self._loop.close()
            raise OSError(errno.EAGAIN, f"the thread {name} could not be started") from error

    @property
    def is_running(self) -> bool:
        """False after `stop`, and in a forked child, which has no such thread."""
        return not self._is_stopping and self._thread.is_alive()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and wait for its result; its deadlines are its own."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise UsageError(f"a callback in {self._thread.name} must not wait for that thread")
        with self._mu:
            if not self.is_running:
                coroutine.close()
                raise UsageError(f"{self._thread.name} was closed, or this is a forked child")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise UsageError(f"{self._thread.name} was closed during a call") from None
        except BaseException:
            future.cancel()  # KeyboardInterrupt must not leave the coroutine behind
            raise

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine in the loop; return a future of its result."""
        with self._mu:
            if not self.is_running:
                coroutine.close()
                raise UsageError(f"{self._thread.name} was closed, or this is a forked child")
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """Run a function in the loop soon; no effect once the thread stops."""
        with self._mu:
            if self.is_running:
                self._loop.call_soon_threadsafe(function, *args)

    def stop(self) -> None:
        """Cancel everything in the loop and end the thread. May be called twice."""
        with self._mu:
            if self.is_running:
                self._is_stopping = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_wind_up())
        finally:
            self._loop.close()


async def _wind_up() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)  # closed transports finish in the next round of the loop
    await asyncio.get_running_loop().shutdown_default_executor()
