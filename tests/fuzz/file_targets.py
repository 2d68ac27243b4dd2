"""Targets of files: checkpoints, records of runs, traces, and facts about jobs."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fuzz.target import target
from paceline.control.client import rendezvous
from paceline.control.transport import auth
from paceline.errors import PacelineError, UsageError
from paceline.launcher import job_registry
from paceline.launcher.hosts import host_list
from paceline.observe.report import page, reading, trace_lanes
from paceline.observe.telemetry import file_formats
from paceline.state.files import layout, load, manifest, save, staging

_ROOT = Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())


def _sweep() -> None:
    """Remove the directories of fuzzers that have ended: they exit without handlers."""
    for old in _ROOT.glob("fuzz-*-*"):
        if not Path("/proc", old.name.split("-")[1]).exists():
            shutil.rmtree(old, ignore_errors=True)


_sweep()
_SCRATCH = Path(tempfile.mkdtemp(prefix=f"fuzz-{os.getpid()}-", dir=_ROOT))
atexit.register(shutil.rmtree, _SCRATCH, ignore_errors=True)


@contextlib.contextmanager
def directory(**files: bytes) -> Iterator[Path]:
    """Yield a directory with these files, the only one at a time."""
    where = _SCRATCH / "files"
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(mode=0o700)
    for name, content in files.items():
        with open(os.open(where / name, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(content)
    yield where


def _sealed(data: bytes) -> bytes:
    """Make the hash of a manifest right."""
    start = len(manifest._BEGINNING)
    if len(data) < start + 64:
        return data
    blank = manifest._BEGINNING + b"0" * 64 + data[start + 64 :]
    return manifest._BEGINNING + hashlib.sha256(blank).hexdigest().encode() + blank[start + 64 :]


@target(PacelineError)
def checkpoint_manifest(data: bytes) -> None:
    manifest.decode(data[1:] if data[:1] == b"0" else _sealed(data[1:]), Path("manifest.json"))


@target(PacelineError, form="json")
def checkpoint_parts(data: bytes) -> None:
    """A manifest whose hash is right, as a tree, and parts that match their hashes."""
    try:
        tree = msgspec.json.decode(data)
        tree = {"sha256": "0" * 64, **{k: v for k, v in tree.items() if k != "sha256"}}
        text = msgspec.json.format(msgspec.json.encode(tree), indent=1) + b"\n"
    except (ValueError, AttributeError, TypeError, RecursionError):
        return
    described = manifest.decode(_sealed(text), Path("manifest.json"))
    if described.num_bytes > 1 << 16:
        return
    with directory() as where:
        parts = []
        for part in described.parts:
            content = layout.header(part.tensors)
            content += bytes(part.bytes - len(content))
            (where / part.file).write_bytes(content)
            parts.append(msgspec.structs.replace(part, sha256=hashlib.sha256(content).hexdigest()))
        whole = msgspec.structs.replace(described, parts=tuple(parts))
        (where / manifest.MANIFEST).write_bytes(manifest.encode(whole))
        assert load.load(where).manifest.step == described.step


_PART = layout.TensorRecord("float32", (4,))


@target(PacelineError)
def checkpoint_part(data: bytes) -> None:
    """A safetensors file whose hash is in the manifest: only the one right header is accepted."""
    records = {"w": _PART}
    size = layout.size_bytes(records)
    data = data[:size].ljust(size, b"\0") if data[:1] != b"\xff" else data
    part = manifest.PartRecord(
        manifest.part_name(0), size, hashlib.sha256(data).hexdigest(), records
    )
    described = manifest.make(step=1, world=1, content=None, parts=[part])
    with directory(**{part.file: data, manifest.MANIFEST: manifest.encode(described)}) as where:
        loaded = load.load(where)
    assert loaded.tensors["w"].shape == (4,) and data.startswith(layout.header(records))


@target(form="json")
def owner_of_a_save(data: bytes) -> None:
    """What a process that takes part in a save has left in its directory."""
    outer = _SCRATCH / ".saving-000000001-nonce"
    outer.mkdir(exist_ok=True)
    (outer / "owner-1.json").write_bytes(data)
    staging.is_dead(outer)


@target(PacelineError, form="json")
def outcome_of_a_part(data: bytes) -> None:
    save.decode_outcome(data, Path("record-00001.json"))


@target()
def event_lines(data: bytes) -> None:
    """The record of a run, as far as the page that `paceline report` makes of it."""
    with directory(**{file_formats.EVENTS_FILE: data}) as where:
        file_formats.last_line(where / file_formats.EVENTS_FILE)
        with contextlib.suppress(UsageError):
            page.render(reading.read_run(where))


@target(form="json")
def run_configuration(data: bytes) -> None:
    with directory(**{file_formats.EVENTS_FILE: b"", file_formats.CONFIG_FILE: data}) as where:
        page.render(reading.read_run(where))


@target(ValueError, form="json")
def trace_file(data: bytes) -> None:
    with directory(**{file_formats.TRACE_FILE: data}) as where:
        trace_lanes.read_trace(where / file_formats.TRACE_FILE)


@target(PacelineError, form="json")
def facts_of_a_job(data: bytes) -> None:
    with directory(**{"job.json": data}) as where:
        facts = job_registry.read_facts(where)
    if facts is not None:
        facts.run_spec()


@target()
def processes_of_a_job(data: bytes) -> None:
    with directory(processes=data) as where:
        job_registry.recorded_processes(where)


@target(PacelineError, form="json")
def published_coordinator(data: bytes) -> None:
    with directory(job=data) as where:
        rendezvous._read(where / "job")


@target(PacelineError)
def host_file(data: bytes) -> None:
    with directory(hosts=data) as where:
        host_list.read_hostfile(where / "hosts")


@target(PacelineError)
def secret_file(data: bytes) -> None:
    with directory(secret=data) as where:
        auth.load_secret(where / "secret")
