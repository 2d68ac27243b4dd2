"""TensorBoard files, without torch: a run for each worker (tb/worker-0), one for the job (tb/job).

The protocol buffers come from the `tensorboard` package. The frame around each record (length and
checksums, as in TensorFlow's record files) is written here: the package's own writer imports numpy
and more, and starts a thread for every file. Files are open only while they are appended to.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.observe.record.sampling import Sample

_UNSAFE = re.compile(r"[^\w ./%()+=#:-]")  # removes markup too: other programs may show the names
_MAX_TAG = 100
_POLYNOMIAL = 0x82F63B78  # CRC-32C, reversed


def safe_tag(name: str) -> str:
    """Return a tag for a value's name; slashes form groups, as usual in TensorBoard."""
    tag = _UNSAFE.sub("_", name)[:_MAX_TAG].strip(" /")
    return tag or "unnamed"


class TensorBoard:
    """Writes samples below a directory; may raise OSError. Used by one thread."""

    def __init__(self, directory: Path) -> None:
        """Raise ImportError if the package is missing or does not match its dependencies."""
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._event: Any = event_pb2.Event  # generated code without types
        self._summary: Any = summary_pb2.Summary
        self._histogram: Any = summary_pb2.HistogramProto
        self._directory = directory
        stamp = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._file_name = f"events.out.tfevents.{stamp}"
        self._begun: set[str] = set()

    def write(self, samples: Iterable[Sample]) -> None:
        """Append a point for every number in the samples."""
        for sample in samples:
            role, number = sample.key
            run = role if role == "job" else f"{role}-{number}"
            data = self._framed(self._points(sample))
            directory = self._directory / run
            if run not in self._begun:
                directory.mkdir(parents=True, exist_ok=True)
                version = self._event(wall_time=time.time(), file_version="brain.Event:2")
                data = self._framed(version) + data
                self._begun.add(run)
            with open(directory / self._file_name, "ab", buffering=0) as file:
                write_all(file.fileno(), data)

    def _points(self, sample: Sample) -> Any:
        reported = {safe_tag(name): value for name, value in sample.reported.items()}
        values = [
            self._summary.Value(tag=tag, simple_value=value)
            for tag, value in {**reported, **sample.measured}.items()
        ]
        if sample.staleness:
            histogram = self._histogram(**_histogram(sample.staleness))
            values.append(self._summary.Value(tag="staleness histogram", histo=histogram))
        return self._event(
            wall_time=time.time(), step=sample.step, summary=self._summary(value=values)
        )

    def _framed(self, event: Any) -> bytes:
        data: bytes = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        return length + _checksum(length) + data + _checksum(data)


def _histogram(counts: Counter[int]) -> dict[str, Any]:
    """Return a bar for each number of versions, from half below to half above it."""
    edges: list[float] = []
    bars: list[float] = []
    for age in sorted(counts):
        if edges and edges[-1] < age - 0.5:  # an empty bar
            edges.append(age - 0.5)
            bars.append(0.0)
        edges.append(age + 0.5)
        bars.append(counts[age])
    return {
        "min": min(counts) - 0.5,
        "max": max(counts) + 0.5,
        "num": counts.total(),
        "sum": sum(age * count for age, count in counts.items()),
        "sum_squares": sum(age * age * count for age, count in counts.items()),
        "bucket_limit": edges,
        "bucket": bars,
    }


def write_all(fd: int, data: bytes) -> None:
    """Write everything; after a partial write, the next one raises the error of the disk."""
    while data:
        data = data[os.write(fd, data) :]


def _remainders() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _remainders()


def _checksum(data: bytes) -> bytes:
    """Return the checksum of record files: a masked CRC-32C."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
