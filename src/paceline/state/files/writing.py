"""Saving: each worker writes its part, one of them publishes all parts with a manifest.

    staging = begin(root, step, nonce)              on every worker
    record = write_part(staging, number, tensors)
    leave_record(staging, number, record, plain)    ... and on one of them:
    left = collect_records(staging, numbers)
    publish(staging, manifest.make(...))

Nothing here communicates: workers on several hosts need a file system that they share. All of it
may run on a background thread. Nothing is a checkpoint until the one rename of `publish`, before
which every file is on the disk. After any error: `abandon(staging)`. `retain` removes old
checkpoints, `sweep` what saves that never ended have left.
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
from paceline.state.files import files, layout, manifest, reading
from paceline.state.files.manifest import Manifest, PartRecord
from paceline.state.files.staging import abandon as abandon
from paceline.state.files.staging import begin as begin
from paceline.state.files.staging import is_dead, outer_of

if TYPE_CHECKING:
    import torch

_GOING = re.compile(r"\.deleting-[A-Za-z0-9_.-]+", re.ASCII)
_POLL_S = 0.02
_ROOM_BYTES = 64 << 10  # for records and the manifest, when space is checked


class Left(msgspec.Struct, frozen=True):
    """What a worker says about its part when it is on the disk, or why it is not."""

    record: PartRecord | None
    plain: Any = None
    failure: str = ""


def write_part(staging: Path, number: int, tensors: Mapping[str, torch.Tensor]) -> PartRecord:
    """Write tensors of the CPU, of any strides, as one file. Blocks until they are on the disk.

    They must not change meanwhile: give a snapshot. Raises CheckpointError (disk), CheckpointUnsafe
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


def leave_record(staging: Path, number: int, record: PartRecord, plain: Any = None) -> None:
    """Tell the one who publishes that a part is there, with plain JSON of one's own."""
    manifest.require_json(plain, f"plain of part {number}")
    _leave(staging, number, Left(record, plain))


def leave_failure(staging: Path, number: int, reason: str) -> None:
    """Tell the one who publishes that a part will not come, so that it does not wait."""
    _leave(staging, number, Left(None, failure=reason))


def collect_records(
    staging: Path, numbers: Collection[int], *, wait_s: float = 0.0
) -> dict[int, Left]:
    """Return what was left for these parts; CheckpointError names those that failed or are late.

    `abandon` by any worker, or another thread, ends the waiting.
    """
    deadline_s = time.monotonic() + wait_s
    found: dict[int, Left] = {}
    while True:
        for number in sorted(set(numbers) - found.keys()):
            if (left := _left(staging, number)) is not None:
                found[number] = left
        failed = [f"part {n}: {left.failure}" for n, left in found.items() if left.failure]
        if failed:
            raise CheckpointError("not all parts could be saved: " + "; ".join(failed))
        missing = sorted(set(numbers) - found.keys())
        if not missing:
            return dict(sorted(found.items()))
        if not staging.is_dir():
            text = f"{staging.parent} was abandoned before parts {missing} were there"
            raise CheckpointError(text, path=staging)
        if time.monotonic() >= deadline_s:
            raise CheckpointError(
                f"{staging.parent}: parts {', '.join(map(str, missing))} of {len(numbers)} were not"
                f" there after {wait_s:.0f} s; their workers are gone or slow, or do not share this"
                " directory",
                path=staging,
            )
        time.sleep(_POLL_S)


def publish(staging: Path, described: Manifest) -> Path:
    """Make a save a checkpoint: by one rename, when everything is on the disk. Returns its path.

    When that step was saved before, the new one is a further attempt of it (see `names`), and wins.
    What then cannot be removed of the staging directory is left to `sweep`.
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
    with suppress(CheckpointError):  # the checkpoint is there
        files.remove_at_once(outer)
    return final


# -- removing: what goes is renamed first, so that no checkpoint is found half removed ---------


def retain(root: Path, keep: int, *, saved: Path | None = None) -> list[Path]:
    """Keep the newest checkpoints, remove the older ones; return what was removed.

    Counted are those that look whole (manifest intact, parts of the right size), the last attempt
    of each step. So what is damaged never displaces what is not; it goes when it is older than all
    that is kept. `saved`, the one that was published just now, is the first of those that are kept:
    after a resume from an older step there may be others with higher ones.
    """
    if keep < 1:
        raise UsageError(f"keep={keep}: expected at least 1")
    kept: set[int] = set()
    going = []
    every = reading.listing(root)  # newest first
    for found in sorted(every, key=lambda found: found.path != saved):
        if len(kept) >= keep or found.step in kept:
            going.append(found.path)
        elif found.manifest is not None:
            kept.add(found.step)
    for path in reversed(going):
        files.remove_at_once(path)
    return going


def sweep(root: Path) -> list[Path]:
    """Remove what saves and removals that died have left; return what that was.

    Checkpoints that a process may still write stay.
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
    # Each is asked for by name: a list that a network file system has kept may be older.
    for part in described.parts:
        path = staging / part.file
        with files.disk_errors("publish without", path):
            size = path.lstat().st_size
        if size != part.bytes:
            text = f"{path} has {size} bytes, its writer told of {part.bytes}"
            raise CheckpointError(text, path=path)
    with files.disk_errors("look into", staging):
        extra = set(os.listdir(staging)) - {part.file for part in described.parts}
    if extra:
        raise UsageError(f"{staging} holds {sorted(extra)}, which the manifest does not name")


def _record_path(staging: Path, number: int) -> Path:
    return outer_of(staging) / manifest.part_name(number).replace("part", "record").replace(
        "safetensors", "json"
    )


def _leave(staging: Path, number: int, left: Left) -> None:
    path = _record_path(staging, number)
    draft = path.with_suffix(".new")
    data = msgspec.json.encode(left)
    files.write_new(draft, [data], need_bytes=len(data))
    with files.disk_errors("rename", draft):
        draft.rename(path)


def _left(staging: Path, number: int) -> Left | None:
    path = _record_path(staging, number)
    with files.disk_errors("read", path):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
    try:
        return msgspec.json.decode(data, type=Left)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path} is no record of a part: {error}", path=path) from None
