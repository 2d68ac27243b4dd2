"""Names in a checkpoint: of its directory, its files and its tensors.

Files have fixed names, so nothing that a manifest says can lead out of its directory. Names of
tensors are never used as paths here, but other programs may do so with what is exported.
A step that is saved again gets the next ATTEMPT of its name ("step-000000100.2"): the one before
stays untouched until the new one is there, and one rename is enough in every case.
"""

from __future__ import annotations

import re
from pathlib import Path

from paceline.errors import CheckpointUnsafe

MANIFEST = "manifest.json"
MAX_PARTS = 100_000
_MAX_NAME = 1024
_CHECKPOINT = re.compile(r"step-([0-9]{9,18})(?:\.([1-9][0-9]{0,5}))?", re.ASCII)
_PART = re.compile(r"part-[0-9]{5}\.safetensors", re.ASCII)
_PICKLE = re.compile(rb"\x80[\x02-\x05]|PK\x03\x04")


def checkpoint_name(step: int, attempt: int = 1) -> str:
    return f"step-{step:09d}" if attempt == 1 else f"step-{step:09d}.{attempt}"


def parse_checkpoint(name: str) -> tuple[int, int] | None:
    """Return (step, attempt), or None when it is no checkpoint's name."""
    found = _CHECKPOINT.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2] or 1))


def part_name(number: int) -> str:
    if not 0 <= number < MAX_PARTS:
        raise ValueError(f"part {number}: expected 0 to {MAX_PARTS - 1}")
    return f"part-{number:05d}.safetensors"


def require_part_name(name: str, path: Path) -> None:
    if not _PART.fullmatch(name):
        raise CheckpointUnsafe(
            f"{path} names a part {name[:100]!r}; expected part-NNNNN.safetensors beside it: a"
            " checkpoint may only name files of its own directory",
            path=path,
        )


def require_tensor_name(name: str, path: Path) -> None:
    """Let through what modules and optimizers call their tensors, on one printable line."""
    reason = ""
    if not 0 < len(name) <= _MAX_NAME:
        reason = f"has {len(name)} characters, expected 1 to {_MAX_NAME}"
    elif not name.isprintable() or "\\" in name:
        reason = "has a control character or a backslash in it"
    elif name.startswith("/") or ".." in name.split("/"):
        reason = "leads out of its directory"
    elif name == "__metadata__":
        reason = "has a meaning of its own in safetensors files"
    if reason:
        raise CheckpointUnsafe(f"{path}: tensor name {name[:100]!r} {reason}", path=path)


def require_no_pickle(beginning: bytes, path: Path) -> None:
    """Refuse by name what torch.save and pickle write; called when a file is not ours anyway."""
    # A safetensors file begins with a length whose upper bytes are 0: it is no pickle.
    if _PICKLE.match(beginning) and beginning[5:8] != b"\0\0\0":
        raise CheckpointUnsafe(
            f"refusing pickle: {path} was written by torch.save or pickle, and loading such a file"
            " can run any code; if you trust it, torch.load(..., weights_only=True) it in your"
            " script and give the result to model.load_state_dict",
            path=path,
        )
