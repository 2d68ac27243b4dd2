"""The files of a run directory, as the recorder's thread writes them.

The first error ends all of them: they are on one disk, and one warning is enough.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from paceline.observe.record.sampling import Sample
from paceline.observe.record.tensorboard import TensorBoard, write_all
from paceline.observe.telemetry.events import Recorded, TrainingConfigured
from paceline.observe.telemetry.file_formats import CONFIG_FILE, EVENTS_FILE, encode_event
from paceline.runtime.process_names import ProcessName

TENSORBOARD = "tb"
_FLUSH_S = 1.0
_FLUSH_BYTES = 1 << 16
_MAX_OPEN = 32  # logs: the pipes and sockets of many ranks need descriptors too


class LogFiles:
    """The output of each process; a replacement continues in its predecessor's file."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, BinaryIO] = {}  # the oldest first

    def begin(self, process_names: Sequence[ProcessName]) -> None:
        """Create empty files for the first processes of the job."""
        for name in process_names:
            (self._directory / name.log_name).write_bytes(b"")

    def write(self, name: ProcessName, data: bytes) -> None:
        file = self._open.get(name.log_name)
        if file is None:
            if len(self._open) >= _MAX_OPEN:
                self._open.pop(next(iter(self._open))).close()
            path = self._directory / name.log_name
            file = self._open[name.log_name] = _opened(path, "ab")
        write_all(file.fileno(), data)

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()


class EventsFile:
    """events.jsonl: lines are buffered, and written at least once per second."""

    def __init__(self, path: Path, *, appends: bool) -> None:
        self._file = _opened(path, "ab" if appends else "wb")
        # The previous writer may have left a truncated line.
        is_cut = appends and self._file.tell() > 0 and not _ends_a_line(path)
        self._lines: list[bytes] = [b"\n"] if is_cut else []
        self._size = 0
        self._flushed_s = time.monotonic()

    def write(self, t: float, event: Recorded) -> None:
        line = encode_event(t, event)
        self._lines.append(line)
        self._size += len(line)
        if self._size > _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        data = b"".join(self._lines)
        self._lines.clear()
        self._size, self._flushed_s = 0, time.monotonic()
        write_all(self._file.fileno(), data)

    def flush_if_due(self) -> None:
        if self._lines and time.monotonic() - self._flushed_s >= _FLUSH_S:
            self.flush()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._file.close()


def _opened(path: Path, mode: str) -> BinaryIO:
    return cast(BinaryIO, open(path, mode, buffering=0))


def _ends_a_line(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


class RunFiles:
    """All files of one run; every method may raise OSError. `configure` returns config.json, given
    what the script has configured.

    A RESUMED run (the supervisor of a detached job was killed) appends to its files.
    """

    def __init__(
        self,
        directory: Path,
        process_names: Sequence[ProcessName],
        configure: Callable[[Mapping[str, str]], bytes],
        *,
        keeps_logs: bool = True,
        is_resumed: bool = False,
    ) -> None:
        self.directory = directory
        self._process_names, self._configure = process_names, configure
        self._keeps_logs, self._is_resumed = keeps_logs, is_resumed
        self._logs = LogFiles(directory)
        self._events: EventsFile | None = None
        self._tensorboard: TensorBoard | None = None
        self._has_tensorboard = True

    def open(self) -> None:
        """Create the directory and the files that are known from the start."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if not self._is_resumed:
            if self._keeps_logs:
                self._logs.begin(self._process_names)
            (self.directory / CONFIG_FILE).write_bytes(self._configure({}))
        self._events = EventsFile(self.directory / EVENTS_FILE, appends=self._is_resumed)

    def event(self, t: float, event: Recorded) -> None:
        assert self._events is not None, "call open() first"
        self._events.write(t, event)
        if isinstance(event, TrainingConfigured) and not self._is_resumed:
            (self.directory / CONFIG_FILE).write_bytes(self._configure(event.values))

    def output(self, name: ProcessName, data: bytes) -> None:
        if self._keeps_logs:
            self._logs.write(name, data)

    def samples(self, samples: Sequence[Sample], say: Callable[[str], None]) -> None:
        """Write TensorBoard files; if that is impossible, print why, once."""
        if not samples or not self._has_tensorboard:
            return
        if self._tensorboard is None:
            try:
                self._tensorboard = TensorBoard(self.directory / TENSORBOARD)
            except Exception as error:  # includes what protobuf raises if versions do not match
                self._has_tensorboard = False
                is_missing = isinstance(error, ModuleNotFoundError)
                how = "pip install tensorboard" if is_missing else f"tensorboard: {error}"[:200]
                say(f"paceline: no TensorBoard files are written; {how}")
                return
        self._tensorboard.write(samples)

    def flush_if_due(self) -> None:
        if self._events is not None:
            self._events.flush_if_due()

    def close(self) -> None:
        """Write what is buffered and close all files, even after an error."""
        self._logs.close()
        if self._events is not None:
            events, self._events = self._events, None
            events.close()
