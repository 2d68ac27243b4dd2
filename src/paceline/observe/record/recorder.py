"""The recorder: the only thread that writes a run directory and samples a run.

The launcher's loop puts events and output into a queue and never waits for a disk. If the disk is
too slow:

    output    while the disk makes progress, the launcher stops reading from the ranks
              (`is_behind`), and they block in their own writes, as on a pipe
    hang      if the disk accepts nothing for some seconds, the job continues; output and events
              that do not fit into the queue are dropped and counted until the disk works again
    error     full, read-only, no directory: one warning, and nothing more is written

Threads: the main thread calls the public methods. Methods named `_keep...`, and what they call, run
on the recorder thread, the only one that uses the files.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from paceline.observe.record.files import RunFiles
from paceline.observe.record.prometheus import Metrics
from paceline.observe.record.sampling import Sampler
from paceline.observe.telemetry import clock
from paceline.observe.telemetry.events import Recorded, RunEnded
from paceline.runtime.formatting import data_size
from paceline.runtime.process_names import ProcessName

MAX_EVENTS = 20_000  # in the queue
BACKLOG_LIMIT_BYTES = 4 << 20  # of output
HANGS_S = 5.0
_SAMPLE_S = 1.0
_TICK_S = 0.5
_ITEM_BYTES = 200  # memory of a queue entry besides its data


@dataclass(frozen=True)
class _Event:
    t: float
    event: Recorded


@dataclass(frozen=True)
class _Output:
    name: ProcessName
    data: bytes


class RunRecorder:
    """Records a run in files and for Prometheus; either may be None. `clock_s`: time of t = 0."""

    def __init__(
        self,
        files: RunFiles | None,
        sampler: Sampler,
        metrics: Metrics | None = None,
        *,
        clock_s: float | None = None,
    ) -> None:
        self._files = files
        self._sampler: Sampler | None = sampler  # None: it failed
        self._metrics = metrics
        self._clock_s = clock.now_s() if clock_s is None else clock_s
        self._say: Callable[[str], None] = lambda _: None
        self._queue: queue.SimpleQueue[_Event | _Output | None] = queue.SimpleQueue()
        self._mu = threading.Lock()
        self._backlog_bytes = 0  # guarded by: _mu
        self._busy_since_s: float | None = None  # written by the recorder thread
        self._dropped_events = self._dropped_bytes = 0  # main thread
        self._sampled_s = 0.0  # on the thread's own clock
        self._is_off = False  # closed, or could not be started
        self._thread = threading.Thread(target=self._keep, name="paceline-recorder", daemon=True)

    def start(self, say: Callable[[str], None]) -> None:
        """Start the thread. Call after forking the ranks: a fork must not see a second thread."""
        if self._thread.ident is not None:
            return  # the job was restarted
        self._say = say
        try:
            self._thread.start()
            if self._metrics is not None:
                say(f"paceline: metrics at {self._metrics.url}")
                self._metrics.start()
        except RuntimeError as error:  # no more threads
            self._is_off = True
            say(f"paceline: nothing is recorded: {error}; the job continues")

    @property
    def is_behind(self) -> bool:
        """True while more output is queued than should be held in memory, and the disk works."""
        with self._mu:
            is_full = self._backlog_bytes > BACKLOG_LIMIT_BYTES
        return is_full and not self._hangs

    @property
    def _hangs(self) -> bool:
        since_s = self._busy_since_s
        return since_s is not None and time.monotonic() - since_s > HANGS_S

    @property
    def is_writing(self) -> bool:
        """Whether there are files, and no error has occurred."""
        return self._files is not None

    def record(self, event: Recorded) -> None:
        """Queue an event; dropped and counted if too many are queued."""
        if self._is_off:
            return
        if self._queue.qsize() > MAX_EVENTS:
            self._dropped_events += 1
        else:
            self._queue.put(_Event(clock.now_s() - self._clock_s, event))

    def output(self, name: ProcessName, data: bytes) -> None:
        """Queue output of a process; dropped and counted if the disk hangs."""
        if self._is_off:
            return
        size = len(data) + _ITEM_BYTES
        with self._mu:
            is_dropped = self._backlog_bytes > BACKLOG_LIMIT_BYTES and self._hangs
            self._backlog_bytes += 0 if is_dropped else size
        if is_dropped:
            self._dropped_bytes += len(data)
        else:
            self._queue.put(_Output(name, data))

    def close(self, ended: RunEnded | None = None, *, patience_s: float | None = None) -> list[str]:
        """Write what is queued and stop; return lines about what was lost.

        Does not wait for a disk that hangs, nor longer than `patience_s`.
        """
        if self._is_off or self._thread.ident is None:
            return []
        self._is_off = True
        if ended is not None:
            self._queue.put(_Event(clock.now_s() - self._clock_s, ended))
        self._queue.put(None)
        until_s = time.monotonic() + (patience_s if patience_s is not None else float("inf"))
        while self._thread.is_alive() and not self._hangs and time.monotonic() < until_s:
            self._thread.join(0.05)
        return self._losses()

    def _losses(self) -> list[str]:
        if self._files is None:
            return []
        directory = self._files.directory
        if self._thread.is_alive():
            return [
                f"paceline: {directory}: the disk does not respond; the end of the record is lost"
            ]
        parts = [f"{self._dropped_events} events"] * (self._dropped_events > 0)
        parts += [f"{data_size(self._dropped_bytes)} of output"] * (self._dropped_bytes > 0)
        what = " and ".join(parts)
        if not what:
            return []
        return [f"paceline: {directory}: {what} are missing: the disk was too slow"]

    # -- the thread --------------------------------------------------------------------------

    def _keep(self) -> None:
        self._sampled_s = self._busy_since_s = time.monotonic()
        self._keep_files(lambda files: files.open(), "cannot be written")
        is_over = False
        while not is_over:
            try:
                item = self._queue.get(timeout=_TICK_S)
            except queue.Empty:
                item = None
            else:
                is_over = item is None
            self._busy_since_s = time.monotonic()
            self._keep_item(item)
            if is_over or self._busy_since_s - self._sampled_s >= _SAMPLE_S:
                self._keep_samples(self._keep_sample)
            self._keep_files(lambda files: files.flush_if_due())
            self._busy_since_s = None
        self._busy_since_s = time.monotonic()
        self._keep_files(lambda files: files.close())
        if self._metrics is not None:
            self._metrics.close()

    def _keep_item(self, item: _Event | _Output | None) -> None:
        if isinstance(item, _Output):
            with self._mu:
                self._backlog_bytes -= len(item.data) + _ITEM_BYTES
            self._keep_files(lambda files: files.output(item.name, item.data))
        elif item is not None:
            self._keep_files(lambda files: files.event(item.t, item.event))
            self._keep_samples(lambda sampler: sampler.state.apply(item.t, item.event))

    def _keep_sample(self, sampler: Sampler) -> None:
        self._sampled_s = time.monotonic()
        samples = sampler.sample(clock.now_s() - self._clock_s)
        if self._metrics is not None:
            self._metrics.update(samples, sampler.state.alive())
        self._keep_files(lambda files: files.samples(samples, self._say))

    def _keep_samples(self, use: Callable[[Sampler], None]) -> None:
        """Use the sampler; an error ends sampling, and nothing else."""
        if self._sampler is None:
            return
        try:
            use(self._sampler)
        except Exception as error:
            self._sampler = None
            self._say(f"paceline: no more curves are recorded: {error!r}; the job continues")

    def _keep_files(
        self, write: Callable[[RunFiles], None], what: str = "cannot be written any more"
    ) -> None:
        """Use the files; an error ends recording, never the job."""
        files = self._files
        if files is None:
            return
        try:
            write(files)
        except Exception as error:
            self._files = None
            with suppress(OSError):
                files.close()
            reason = error.strerror if isinstance(error, OSError) else repr(error)
            kept = "logs, config.json, events.jsonl and TensorBoard files"
            self._say(
                f"paceline: {files.directory} {what}: {reason}; the job continues without {kept}"
            )
