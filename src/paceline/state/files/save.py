"""Saving: each worker writes its part, one of them publishes all parts with a manifest.

    staging = begin(root, step, nonce)              on every worker
    record = write_part(staging, number, tensors)
    write_record(staging, number, record, plain)    ... and on one of them:
    outcomes = collect_records(staging, numbers)
    publish(staging, manifest.make(...))

Workers communicate through files only: workers on several hosts need a shared file system. All of
it may run on a background thread. Nothing is a checkpoint until the one rename of `publish`; before
it, every file is on the disk. After any error: `abandon(staging)`. `retain` removes old
checkpoints, `sweep` the remains of saves that never ended.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.errors import CheckpointError, UsageError
from paceline.state.files import durable_files as files
from paceline.state.files import layout, manifest
from paceline.state.files import load as reading
from paceline.state.files.manifest import Manifest, PartRecord
from paceline.state.files.staging import abandon as abandon
from paceline.state.files.staging import begin as begin
from paceline.state.files.staging import is_dead, outer_of

if TYPE_CHECKING:
    import torch

_GOING = re.compile(r"\.deleting-[A-Za-z0-9_.-]+", re.ASCII)
_POLL_S = 0.02
_ROOM_BYTES = 64 << 10  # for records and the manifest, in the check of free space


class PartOutcome(msgspec.Struct, frozen=True):
    """The record of a worker's part, or why it failed."""

    record: PartRecord | None
    plain: Any = None
    failure: str = ""


def write_part(staging: Path, number: int, tensors: Mapping[str, torch.Tensor]) -> PartRecord:
    """Write CPU tensors, of any strides, as one file. Blocks until they are on the disk.

    They must not change meanwhile: pass a snapshot. Raise CheckpointError (disk), CheckpointUnsafe
    (a name), UnsupportedTensor.
    """
    from paceline.state.files.tensors import pieces, record_of

    path = staging / manifest.part_name(number)
    records = layout.in_order({name: record_of(name, t, path) for name, t in tensors.items()})
    head = layout.header(records)
    need = layout.size_bytes(records)
    files.require_space(need + _ROOM_BYTES, staging)

    def content() -> Iterator[bytes | memoryview]:
        yield head
        for name in records:
            yield from pieces(tensors[name])

    sha256, size = files.write_new(path, content(), need_bytes=need)
    if size != need:
        raise CheckpointError(f"{path}: wrote {size} bytes, expected {need}", path=path)
    return PartRecord(path.name, size, sha256, records)


def write_record(staging: Path, number: int, record: PartRecord, plain: Any = None) -> None:
    """Report to the publishing worker that a part is written, with plain JSON of this worker."""
    manifest.require_json(plain, f"plain of part {number}")
    _leave(staging, number, PartOutcome(record, plain))


def write_failure(staging: Path, number: int, reason: str) -> None:
    """Report to the publishing worker that a part failed, so that it does not wait."""
    _leave(staging, number, PartOutcome(None, failure=reason))


def collect_records(
    staging: Path, numbers: Collection[int], *, wait_s: float = 0.0
) -> dict[int, PartOutcome]:
    """Return the outcomes of these parts; raise CheckpointError if some failed or are late.

    `abandon` by any worker or thread ends the wait.
    """
    deadline_s = time.monotonic() + wait_s
    found: dict[int, PartOutcome] = {}
    while True:
        for number in sorted(set(numbers) - found.keys()):
            if (left := _left(staging, number)) is not None:
                found[number] = left
        failed = [f"part {n}: {left.failure}" for n, left in found.items() if left.failure]
        if failed:
            raise CheckpointError("some parts could not be saved: " + "; ".join(failed))
        missing = sorted(set(numbers) - found.keys())
        if not missing:
            return dict(sorted(found.items()))
        if not staging.is_dir():
            text = f"{staging.parent} was abandoned before parts {missing} were written"
            raise CheckpointError(text, path=staging)
        if time.monotonic() >= deadline_s:
            raise CheckpointError(
                f"{staging.parent}: parts {', '.join(map(str, missing))} of {len(numbers)} were not"
                f" written after {wait_s:.0f} s; their workers are gone or slow, or do not share"
                " this directory",
                path=staging,
            )
        time.sleep(_POLL_S)


def publish(staging: Path, described: Manifest) -> Path:
    """Publish a checkpoint by one rename, when everything is on the disk; return its path.

    If that step was saved before, the new one is a further attempt (see manifest.py) and takes
    precedence. `sweep` removes what is left of the staging directory.
    """
    outer = outer_of(staging)
    root = outer.parent
    path = staging / manifest.MANIFEST
    manifest.check(described, path)
    _require_files(staging, described)
    data = manifest.encode(described)
    files.write_new(path, [data], need_bytes=len(data))
    files.sync_directory(staging)
    final = _rename(staging, root, described.step)
    files.sync_directory(root)
    with suppress(CheckpointError):  # the checkpoint is published
        files.remove_at_once(outer)
    return final


# -- removing: rename first, so that no checkpoint is found half removed -----------------------


def retain(root: Path, keep: int, *, saved: Path | None = None) -> list[Path]:
    """Keep the newest checkpoints, remove older ones; return the removed paths.

    Only checkpoints that look intact count (manifest valid, parts of the right size), the last
    attempt of each step. So a damaged checkpoint never displaces an intact one; it is removed when
    it is older than all that are kept. `saved`, which was just published, is always kept: after a
    resume from an older step there may be others with higher steps.
    """
    if keep < 1:
        raise UsageError(f"keep={keep}: expected at least 1")
    kept: set[int] = set()
    going = []
    every = reading.list_checkpoints(root)  # newest first
    for found in sorted(every, key=lambda found: found.path != saved):
        if len(kept) >= keep or found.step in kept:
            going.append(found.path)
        elif found.manifest is not None:
            kept.add(found.step)
    for path in reversed(going):
        files.remove_at_once(path)
    return going


def sweep(root: Path) -> list[Path]:
    """Remove the remains of saves and removals whose process died; return their paths.

    Saves that a process may still write are kept.
    """
    if not root.is_dir():
        return []
    with files.disk_errors("look into", root):
        entries = sorted(
            path for path in root.glob(".*") if path.is_dir() and not path.is_symlink()
        )
    dead = [path for path in entries if _GOING.fullmatch(path.name) or is_dead(path)]
    for path in dead:
        files.remove_tree(path)
    return dead


# -- steps of saving ----------------------------------------------------------------------------


def _rename(staging: Path, root: Path, step: int) -> Path:
    with files.disk_errors("publish in", root):
        parsed = [manifest.parse_checkpoint(name) for name in os.listdir(root)]
        attempt = max((found[1] for found in parsed if found and found[0] == step), default=0) + 1
        final = root / manifest.checkpoint_name(step, attempt)
        staging.rename(final)
    return final


def _require_files(staging: Path, described: Manifest) -> None:
    # By name: a network file system may have cached an older listing.
    for part in described.parts:
        path = staging / part.file
        with files.disk_errors("publish without", path):
            size = path.lstat().st_size
        if size != part.bytes:
            text = f"{path} has {size} bytes, its writer reported {part.bytes}"
            raise CheckpointError(text, path=path)
    with files.disk_errors("look into", staging):
        extra = set(os.listdir(staging)) - {part.file for part in described.parts}
    if extra:
        raise UsageError(f"{staging} holds {sorted(extra)}, which the manifest does not name")


def _record_path(staging: Path, number: int) -> Path:
    return outer_of(staging) / manifest.part_name(number).replace("part", "record").replace(
        "safetensors", "json"
    )


def _leave(staging: Path, number: int, left: PartOutcome) -> None:
    path = _record_path(staging, number)
    draft = path.with_suffix(".new")
    data = msgspec.json.encode(left)
    files.write_new(draft, [data], need_bytes=len(data))
    with files.disk_errors("rename", draft):
        draft.rename(path)


def _left(staging: Path, number: int) -> PartOutcome | None:
    path = _record_path(staging, number)
    with files.disk_errors("read", path):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
    return decode_outcome(data, path)


def decode_outcome(data: bytes, path: Path) -> PartOutcome:
    """Return what the writer of a part reports; raise CheckpointError if these bytes are none."""
    try:
        return msgspec.json.decode(data, type=PartOutcome)
    except (ValueError, RecursionError) as error:  # ValueError: msgspec's and Unicode's
        raise CheckpointError(f"{path} is not the record of a part: {error}", path=path) from None
