"""Output of processes that an agent repeats on its own standard output, for an engine's logs."""

from __future__ import annotations

import os
from contextlib import suppress

from paceline.launcher.processes.output import OutputSink
from paceline.runtime.process_names import ProcessName

_STDOUT = 1
_MAX_PART_BYTES = 1 << 16  # of a line without an end


class RepeatedOutput:
    """Gives the output of one process to another sink, and whole lines to standard output."""

    def __init__(self, name: ProcessName, sink: OutputSink) -> None:
        self._prefix, self._sink = f"[{name.label}] ".encode(), sink
        self._parts = {False: b"", True: b""}  # of the last line, by whether it is an error

    @property
    def is_behind(self) -> bool:
        return self._sink.is_behind

    def feed(self, is_error: bool, data: bytes) -> None:
        self._sink.feed(is_error, data)
        *lines, part = (self._parts[is_error] + data).split(b"\n")
        if len(part) > _MAX_PART_BYTES:
            lines, part = [*lines, part], b""
        self._parts[is_error] = part
        self._write(lines)

    def finish(self, is_error: bool) -> None:
        self._sink.finish(is_error)
        if self._parts[is_error]:
            self._write([self._parts[is_error]])

    def _write(self, lines: list[bytes]) -> None:
        with suppress(OSError):  # a full disk of the engine's logs is no reason to stop
            if lines:
                os.write(_STDOUT, b"".join(self._prefix + line + b"\n" for line in lines))
