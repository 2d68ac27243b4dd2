"""Reading: which checkpoints there are, whether they are intact, and their tensors.

Each byte that is used was hashed in the same pass, from a descriptor of the file itself: a
concurrent change is not used. An invalid checkpoint raises a subclass of CheckpointError with the
name of the file.

To INSPECT is cheap (the manifest's own hash, names and sizes of the parts); only `verify` and
`load` read the parts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.errors import CheckpointCorrupt, CheckpointError, UsageError
from paceline.state.files import durable_files as files
from paceline.state.files import layout, manifest
from paceline.state.files.manifest import Manifest, PartRecord

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint in a directory, after an inspection."""

    path: Path
    step: int
    attempt: int
    manifest: Manifest | None
    refusal: CheckpointError | None  # why there is no manifest


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint of which all bytes were verified."""

    path: Path
    manifest: Manifest
    tensors: dict[str, torch.Tensor]  # tensors of one part share memory

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def content(self) -> Any:
        return self.manifest.content


@dataclass(frozen=True)
class NewestCheckpoint:
    """The newest valid checkpoint, if there is one, and notices about newer ones."""

    loaded: LoadedCheckpoint | None
    notices: tuple[str, ...]


def list_checkpoints(root: Path) -> list[CheckpointEntry]:
    """Inspect every checkpoint in a directory, newest first; none if it does not exist."""
    with files.disk_errors("list", root):
        try:
            entries = os.listdir(root)
        except FileNotFoundError:
            return []
    parsed = {name: manifest.parse_checkpoint(name) for name in entries}
    entries_found = [
        _inspected(root / name, *found) for name, found in parsed.items() if found is not None
    ]
    return sorted(entries_found, key=lambda each: (each.step, each.attempt), reverse=True)


def inspect(path: Path) -> Manifest:
    """Return the manifest of a checkpoint; all files must exist with the right sizes."""
    with files.opened_directory(path) as directory:
        return _inspect(path, directory)


def verify(path: Path) -> Manifest:
    """Read and verify everything; needs no torch and little memory."""
    with files.opened_directory(path) as directory:
        described = _inspect(path, directory)
        for part in described.parts:
            _read_part(path, directory, part, None)
    return described


def load(path: Path, *, wanted: Callable[[str], bool] | None = None) -> LoadedCheckpoint:
    """Verify and load; with `wanted`, only those tensors and the parts that contain them."""
    from paceline.state.files.tensors import empty_bytes, views

    tensors: dict[str, torch.Tensor] = {}
    with files.opened_directory(path) as directory:
        described = _inspect(path, directory)
        for part in described.parts:
            if wanted is None or any(map(wanted, part.tensors)):
                data = empty_bytes(part.bytes)
                _read_part(path, directory, part, data.numpy().data)
                tensors.update(views(data, part.tensors))
    if wanted is not None:
        tensors = {name: tensor for name, tensor in tensors.items() if wanted(name)}
    return LoadedCheckpoint(path, described, tensors)


def newest(
    root: Path,
    on_damage: Literal["fall back", "stop"] = "fall back",
    *,
    wanted: Callable[[str], bool] | None = None,
) -> NewestCheckpoint:
    """Load the newest valid checkpoint; none if the directory holds no checkpoint at all.

    If the newest one is invalid, "stop" raises, and "fall back" takes an older one with a notice.
    If all are invalid, the first error is raised with all errors in its text: to start from scratch
    would lose work.
    """
    if on_damage not in ("fall back", "stop"):
        raise UsageError(f"on_damage={on_damage!r}: expected 'fall back' or 'stop'")
    refusals: list[CheckpointError] = []
    for found in list_checkpoints(root):
        try:
            loaded = load(found.path, wanted=wanted)
        except CheckpointError as error:  # noqa: PERF203  # each turn reads a checkpoint
            if on_damage == "stop":
                raise
            refusals.append(error)
        else:
            notices = tuple(f"{error}; fell back to {loaded.path}" for error in refusals)
            return NewestCheckpoint(loaded, notices)
    if refusals:
        text = f"none of the {len(refusals)} checkpoints in {root} is valid: "
        raise type(refusals[0])(text + "; ".join(map(str, refusals)), path=root)
    return NewestCheckpoint(None, ())


def _inspected(path: Path, step: int, attempt: int) -> CheckpointEntry:
    try:
        return CheckpointEntry(path, step, attempt, inspect(path), None)
    except CheckpointError as error:
        return CheckpointEntry(path, step, attempt, None, error)


def _inspect(path: Path, directory: int) -> Manifest:
    described = _manifest(path / manifest.MANIFEST, directory)
    parsed = manifest.parse_checkpoint(path.name)
    if parsed is not None and parsed[0] != described.step:
        raise _corrupt(path, f"its manifest is of step {described.step}")
    present = {name for name in os.listdir(directory) if not name.startswith(".")}
    known = {manifest.MANIFEST, *(part.file for part in described.parts)}
    if present - known:
        extra = ", ".join(sorted(present - known)[:5])
        raise _corrupt(path, f"it holds {extra}, which its manifest does not name; remove it")
    for part in described.parts:
        with _opened_part(path, directory, part):
            pass
    return described


def _manifest(path: Path, directory: int) -> Manifest:
    try:
        os.stat(path.name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        raise _corrupt(path, "it is missing: not a checkpoint, or files were removed") from None
    with files.opened_file(path, directory) as (fd, size):
        if size > manifest.MAX_BYTES:
            raise _corrupt(path, f"it has {size} bytes, expected up to {manifest.MAX_BYTES}")
        data = bytearray(size)
        files.read_into(fd, memoryview(data), path)
    return manifest.decode(bytes(data), path)


@contextmanager
def _opened_part(path: Path, directory: int, part: PartRecord) -> Iterator[int]:
    where = path / part.file
    try:
        os.stat(part.file, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        expected = f"expected {part.bytes} bytes with sha256 {part.sha256}"
        raise _corrupt(where, f"it is missing, {expected}") from None
    with files.opened_file(where, directory) as (fd, size):
        if size != part.bytes:
            manifest.require_no_pickle(os.pread(fd, 8, 0), where)
            raise _corrupt(where, f"expected {part.bytes} bytes, found {size}")
        yield fd


def _read_part(path: Path, directory: int, part: PartRecord, into: memoryview | None) -> None:
    """Read and verify a part; without `into`, only verify."""
    where, head = path / part.file, layout.header(part.tensors)
    digest, at, beginning, is_ours = hashlib.sha256(), 0, b"", True
    scratch = memoryview(bytearray(min(part.bytes, files.PIECE_BYTES)))
    with _opened_part(path, directory, part) as fd:
        while at < part.bytes:
            count = min(part.bytes - at, files.PIECE_BYTES)
            piece = scratch[:count] if into is None else into[at : at + count]
            files.read_into(fd, piece, where)
            digest.update(piece)
            beginning = beginning or bytes(piece[:8])
            expected = head[at : at + count]
            is_ours = is_ours and piece[: len(expected)] == expected
            at += count
    actual = digest.hexdigest()
    if actual != part.sha256:
        manifest.require_no_pickle(beginning, where)
        raise _corrupt(where, f"expected sha256 {part.sha256}, found {actual}")
    if not is_ours:
        manifest.require_no_pickle(beginning, where)
        text = "its hash is correct, but its header does not match the tensors in the manifest"
        raise _corrupt(where, f"{text} (order, offsets or length)")


def _corrupt(path: Path, reason: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"{path} is damaged: {reason}", path=path)
