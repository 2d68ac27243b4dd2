"""The manifest: what a checkpoint holds, and the hashes that verify each of its bytes.

It is readable JSON, and begins with its own hash:

    {
     "sha256": "0f3a...",        of this whole file with 64 zeros in this place
     "format": 1,

So any change is noticed before it is parsed; the hashes of the parts are in it.

Files have fixed names, so a manifest cannot refer to a file outside of its directory. Names of
tensors are never used as paths here, but other programs may do so with exported files. A step that
is saved again gets the next ATTEMPT of its name ("step-000000100.2"): the previous attempt stays
untouched until the new one is complete, and one rename suffices in every case.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec

import paceline
from paceline.errors import (
    CheckpointCorrupt,
    CheckpointUnsafe,
    CheckpointUnsupported,
    UsageError,
)
from paceline.state.files import layout
from paceline.state.files.layout import Size, TensorRecord

MANIFEST = "manifest.json"
MAX_PARTS = 100_000
_MAX_NAME = 1024
_CHECKPOINT = re.compile(r"step-([0-9]{9,18})(?:\.([1-9][0-9]{0,5}))?", re.ASCII)
_PART = re.compile(r"part-[0-9]{5}\.safetensors", re.ASCII)
_PICKLE = re.compile(rb"\x80[\x02-\x05]|PK\x03\x04")
FORMAT = 1
MAX_BYTES = 256 << 20
_BEGINNING = b'{\n "sha256": "'
_BLANK = "0" * 64
_HASH = slice(len(_BEGINNING), len(_BEGINNING) + len(_BLANK))

Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class PartRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of tensors, in file order."""

    file: str
    bytes: Size
    sha256: Sha256
    tensors: dict[str, TensorRecord]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything about a checkpoint except the tensors' values."""

    format: int
    paceline: str  # version that wrote it
    created: str  # UTC, ISO 8601
    step: Size
    world: Annotated[int, msgspec.Meta(ge=1)]  # how many workers saved it
    content: Any  # plain JSON, defined by the caller
    parts: tuple[PartRecord, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def tensors(self) -> dict[str, TensorRecord]:
        return {name: record for part in self.parts for name, record in part.tensors.items()}


class _Sealed(Manifest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    sha256: str


class _OnlyFormat(msgspec.Struct):
    format: int


def make(*, step: int, world: int, content: Any, parts: Iterable[PartRecord]) -> Manifest:
    """Describe a checkpoint that is being saved now."""
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Manifest(FORMAT, paceline.__version__, created, step, world, content, tuple(parts))


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of the file; raise UsageError if `content` is not plain JSON."""
    require_json(manifest.content, "content")
    fields = {"sha256": _BLANK, **msgspec.structs.asdict(manifest)}
    data = msgspec.json.format(msgspec.json.encode(fields), indent=1) + b"\n"
    return data[: _HASH.start] + hashlib.sha256(data).hexdigest().encode() + data[_HASH.stop :]


def decode(data: bytes, path: Path) -> Manifest:
    """Verify and parse; `path` is for error messages. Raise a subclass of CheckpointError."""
    require_no_pickle(data[:8], path)
    expected = data[_HASH].decode("ascii", errors="replace")
    blanked = data[: _HASH.start] + _BLANK.encode() + data[_HASH.stop :]
    actual = hashlib.sha256(blanked).hexdigest()
    is_intact = data.startswith(_BEGINNING) and expected == actual
    _require_known_format(data, path, is_intact=is_intact)
    if not data.startswith(_BEGINNING):
        raise _corrupt(path, f"expected it to begin with its hash, found {data[:40]!r}")
    if not is_intact:
        raise _corrupt(path, f"expected sha256 {expected}, found {actual}")
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _corrupt(path, f"its hash is correct, but it is no manifest: {error}") from None
    fields = msgspec.structs.asdict(sealed)
    del fields["sha256"]
    manifest = Manifest(**fields)
    check(manifest, path)
    return manifest


def check(manifest: Manifest, path: Path) -> None:
    """Raise CheckpointError if the parts cannot be those of a checkpoint."""
    files: set[str] = set()
    seen: set[str] = set()
    for part in manifest.parts:
        require_part_name(part.file, path)
        if part.file in files:
            raise _corrupt(path, f"it names {part.file} twice")
        files.add(part.file)
        for name, record in part.tensors.items():
            require_tensor_name(name, path)
            if name in seen:
                raise _corrupt(path, f"tensor {name!r} is in two parts")
            if fault := layout.find_fault(record):
                raise _corrupt(path, f"tensor {name!r} {fault}")
            seen.add(name)
        if list(layout.in_order(part.tensors)) != list(part.tensors):
            raise _corrupt(path, f"the tensors of {part.file} are not in order: wide dtypes first")
        needed = layout.size_bytes(part.tensors)
        if part.bytes != needed:
            text = f"the tensors of {part.file} need {needed} bytes, it says {part.bytes}"
            raise _corrupt(path, text)


def require_json(value: Any, where: str) -> None:
    """Raise UsageError unless a value survives a JSON round trip (tuples become lists)."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise UsageError(f"{where} has the key {key!r}; JSON has only strings as keys")
            require_json(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            require_json(item, f"{where}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{where} is {value}, which JSON cannot hold; convert it to a string")
    elif isinstance(value, str) and re.search("[\ud800-\udfff]", value):
        raise UsageError(f"{where} is {value!r}, which is not valid Unicode")
    elif not (value is None or isinstance(value, bool | int | float | str)):
        raise UsageError(f"{where} is a {type(value).__name__}; a manifest holds only plain JSON")


# -- names -------------------------------------------------------------------------------------


def checkpoint_name(step: int, attempt: int = 1) -> str:
    return f"step-{step:09d}" if attempt == 1 else f"step-{step:09d}.{attempt}"


def parse_checkpoint(name: str) -> tuple[int, int] | None:
    """Return (step, attempt), or None if it is not the name of a checkpoint."""
    found = _CHECKPOINT.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2] or 1))


def part_name(number: int) -> str:
    if not 0 <= number < MAX_PARTS:
        raise ValueError(f"part {number}: expected 0 to {MAX_PARTS - 1}")
    return f"part-{number:05d}.safetensors"


def require_part_name(name: str, path: Path) -> None:
    if not _PART.fullmatch(name):
        raise CheckpointUnsafe(
            f"{path} names a part {name[:100]!r}; expected part-NNNNN.safetensors: a checkpoint"
            " may name only files of its own directory",
            path=path,
        )


def require_tensor_name(name: str, path: Path) -> None:
    """Raise CheckpointUnsafe unless a name could be a tensor of a module or an optimizer."""
    reason = ""
    if not 0 < len(name) <= _MAX_NAME:
        reason = f"has {len(name)} characters, expected 1 to {_MAX_NAME}"
    elif not name.isprintable() or "\\" in name:
        reason = "contains a control character or a backslash"
    elif name.startswith("/") or ".." in name.split("/"):
        reason = "leads out of its directory"
    elif name == "__metadata__":
        reason = "is reserved in safetensors files"
    if reason:
        raise CheckpointUnsafe(f"{path}: tensor name {name[:100]!r} {reason}", path=path)


def require_no_pickle(beginning: bytes, path: Path) -> None:
    """Raise CheckpointUnsafe for files of torch.save and pickle; called for invalid files."""
    # A safetensors file begins with a length whose upper bytes are 0: not a pickle.
    if _PICKLE.match(beginning) and beginning[5:8] != b"\0\0\0":
        raise CheckpointUnsafe(
            f"refusing pickle: {path} was written by torch.save or pickle, and loading such a file"
            " can run any code; if you trust it, torch.load(..., weights_only=True) it in your"
            " script and give the result to model.load_state_dict",
            path=path,
        )


# -- errors of a manifest ----------------------------------------------------------------------


def _require_known_format(data: bytes, path: Path, *, is_intact: bool) -> None:
    try:
        found = msgspec.json.decode(data, type=_OnlyFormat).format
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return  # decode() reports the error later
    if found > FORMAT:
        also = "" if is_intact else " (or it is damaged: its hash does not match)"
        raise CheckpointUnsupported(
            f"{path}: newer format {found} > {FORMAT}{also}; update Paceline"
            f" (this is {paceline.__version__})",
            path=path,
        )
    if found < 1 and is_intact:
        raise _corrupt(path, f"format {found} does not exist, expected 1 to {FORMAT}")


def _corrupt(path: Path, reason: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"{path} is damaged: {reason}", path=path)
