"""Reading: which checkpoints there are, whether they are what was written, and their tensors.

Each byte that is used was hashed in the same pass, from a descriptor of the file itself: what
somebody changes meanwhile is not used. A refusal is one of the errors under CheckpointError, and
names the file.

A LOOK is cheap (the manifest's own hash, names and sizes of the parts); only `verify` and `load`
read the parts.
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
from paceline.state.files import files, layout, manifest
from paceline.state.files.manifest import Manifest, PartRecord

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Found:
    """A checkpoint in a directory, after a look."""

    path: Path
    step: int
    attempt: int
    manifest: Manifest | None
    refusal: CheckpointError | None  # why there is no manifest


@dataclass(frozen=True)
class Loaded:
    """A checkpoint whose bytes were all verified."""

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
class Newest:
    """The newest valid checkpoint, if there is one, and what is to be said about newer ones."""

    loaded: Loaded | None
    notices: tuple[str, ...]


def listing(root: Path) -> list[Found]:
    """Look at every checkpoint in a directory, newest first; none when it does not exist."""
    with files.disk_errors("look into", root):
        try:
            entries = os.listdir(root)
        except FileNotFoundError:
            return []
    parsed = {name: manifest.parse_checkpoint(name) for name in entries}
    found = [_found(root / name, *place) for name, place in parsed.items() if place is not None]
    return sorted(found, key=lambda each: (each.step, each.attempt), reverse=True)


def look(path: Path) -> Manifest:
    """Return the manifest of a checkpoint whose files are all there, in their sizes."""
    with files.opened_directory(path) as directory:
        return _look(path, directory)


def verify(path: Path) -> Manifest:
    """Read and verify everything; needs no torch and little memory."""
    with files.opened_directory(path) as directory:
        described = _look(path, directory)
        for part in described.parts:
            _read_part(path, directory, part, None)
    return described


def load(path: Path, *, wanted: Callable[[str], bool] | None = None) -> Loaded:
    """Verify and load; with `wanted`, only those tensors and the parts that they are in."""
    from paceline.state.files.tensors import empty_bytes, views

    tensors: dict[str, torch.Tensor] = {}
    with files.opened_directory(path) as directory:
        described = _look(path, directory)
        for part in described.parts:
            if wanted is None or any(map(wanted, part.tensors)):
                data = empty_bytes(part.bytes)
                _read_part(path, directory, part, data.numpy().data)
                tensors.update(views(data, part.tensors))
    if wanted is not None:
        tensors = {name: tensor for name, tensor in tensors.items() if wanted(name)}
    return Loaded(path, described, tensors)


def newest(
    root: Path,
    on_damage: Literal["fall back", "stop"] = "fall back",
    *,
    wanted: Callable[[str], bool] | None = None,
) -> Newest:
    """Load the newest valid checkpoint; none when the directory holds no checkpoint at all.

    "stop" raises for the newest one that is refused, "fall back" takes an older one and says so.
    When there are some and none is valid, the first refusal is raised with all of them in it:
    beginning anew would not be what anybody wants.
    """
    if on_damage not in ("fall back", "stop"):
        raise UsageError(f"on_damage={on_damage!r}: expected 'fall back' or 'stop'")
    refusals: list[CheckpointError] = []
    for found in listing(root):
        try:
            loaded = load(found.path, wanted=wanted)
        except CheckpointError as error:  # noqa: PERF203  # each turn reads a checkpoint
            if on_damage == "stop":
                raise
            refusals.append(error)
        else:
            notices = tuple(f"{error}; fell back to {loaded.path}" for error in refusals)
            return Newest(loaded, notices)
    if refusals:
        text = f"none of the {len(refusals)} checkpoints in {root} is valid: "
        raise type(refusals[0])(text + "; ".join(map(str, refusals)), path=root)
    return Newest(None, ())


def _found(path: Path, step: int, attempt: int) -> Found:
    try:
        return Found(path, step, attempt, look(path), None)
    except CheckpointError as error:
        return Found(path, step, attempt, None, error)


def _look(path: Path, directory: int) -> Manifest:
    described = _manifest(path / manifest.MANIFEST, directory)
    parsed = manifest.parse_checkpoint(path.name)
    if parsed is not None and parsed[0] != described.step:
        raise _corrupt(path, f"its manifest is that of step {described.step}")
    present = {name for name in os.listdir(directory) if not name.startswith(".")}
    known = {manifest.MANIFEST, *(part.file for part in described.parts)}
    if present - known:
        extra = ", ".join(sorted(present - known)[:5])
        raise _corrupt(path, f"it holds {extra}, which its manifest does not name; remove that")
    for part in described.parts:
        with _opened_part(path, directory, part):
            pass
    return described


def _manifest(path: Path, directory: int) -> Manifest:
    try:
        os.stat(path.name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        raise _corrupt(
            path, "it is missing: this is no checkpoint, or parts were removed"
        ) from None
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
        text = "its hash is right, but its header is not the one of the tensors in the manifest"
        raise _corrupt(where, f"{text} (another order, overlapping or outlying places, a length)")


def _corrupt(path: Path, reason: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"{path} is damaged: {reason}", path=path)
