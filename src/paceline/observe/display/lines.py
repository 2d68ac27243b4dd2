"""Bytes from a rank become lines that are safe to show.

A rank may print anything: binary data, a megabyte without a newline, progress bars that return to
the start of the line. `LineSplitter` keeps at most `limit_bytes` of an unfinished line and counts
the rest, so memory stays bounded; the line says how much was cut. `printable` keeps colours and
shows other control bytes as escapes, so that no rank can clear the screen or ring the bell. The log
files of `--log-dir` get the raw bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

LINE_LIMIT_BYTES = 16 * 1024

# All of C0/C1 but tab; escape stays only if it begins a colour ("SGR") sequence.
_UNSAFE = re.compile(r"\x1b(?!\[[0-9;:]*m)|[\x00-\x08\x0a-\x1a\x1c-\x1f\x7f-\x9f]")


def printable(raw: bytes) -> str:
    """Decode one line for the terminal: UTF-8, and visible escapes for other bytes."""
    text = raw.decode("utf-8", errors="backslashreplace")
    return _UNSAFE.sub(lambda found: f"\\x{ord(found.group()):02x}", text)


class LineSplitter:
    """Splits one stream into lines. Not thread-safe."""

    def __init__(self, *, limit_bytes: int = LINE_LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._pending = b""
        self._cut_bytes = 0

    def feed(self, data: bytes) -> Iterator[str]:
        """Yield the lines that `data` completes."""
        *complete, rest = data.split(b"\n")
        for piece in complete:
            self._append(piece)
            yield self._take()
        self._append(rest)
        if b"\r" in self._pending:
            # A progress bar: text before the last return has been overwritten.
            head, _, tail = self._pending.rpartition(b"\r")
            if tail:
                self._pending = tail
            else:
                self._pending = head.rpartition(b"\r")[2] + b"\r"

    def finish(self) -> Iterator[str]:
        """Yield what is left at the end of the stream."""
        if self._pending or self._cut_bytes:
            yield self._take()

    def _append(self, piece: bytes) -> None:
        room = max(0, self._limit - len(self._pending))
        self._cut_bytes += max(0, len(piece) - room)
        self._pending += piece[:room]

    def _take(self) -> str:
        line, cut = self._pending, self._cut_bytes
        self._pending, self._cut_bytes = b"", 0
        text = printable(_as_painted(line))
        if cut:
            total = len(line) + cut
            text += f" ... [line of {total} bytes cut here; --log-dir keeps whole lines]"
        return text


def _as_painted(line: bytes) -> bytes:
    """Return what a terminal would show of a line with carriage returns in it."""
    parts = [part for part in line.split(b"\r") if part]
    return parts[-1] if parts else b""
