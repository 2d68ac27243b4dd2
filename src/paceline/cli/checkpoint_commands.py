"""`paceline checkpoint ls|show|verify|export`. Only `export` needs torch.

Text from files is printed without control characters: a file may come from anywhere.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, UsageError
from paceline.runtime.formatting import data_size
from paceline.state.files import durable_files as files
from paceline.state.files import load as reading
from paceline.state.files import manifest
from paceline.state.files.manifest import Manifest

_SHOWN_ITEMS = 8  # of a long list
_SHOWN_CHARACTERS = 200  # of a long text


def ls(directory: Path) -> int:
    """List the checkpoints in a directory; reads only their manifests."""
    _require_directory(directory)
    found = reading.list_checkpoints(directory)
    if not found:
        _print([f"no checkpoints in {directory}"])
        return 0
    rows: list[tuple[str, ...]] = [("step", "size", "saved", "workers", "pace", "name", "state")]
    for each in found:
        columns: tuple[str, ...] = ("?", "?", "?", "?")
        if (described := each.manifest) is not None:
            pace = described.content.get("pace") if isinstance(described.content, dict) else None
            columns = (
                data_size(described.num_bytes),
                described.created,
                str(described.world),
                pace if isinstance(pace, str) else "",
            )
        state = "complete" if each.refusal is None else type(each.refusal).__name__
        rows.append((str(each.step), *columns, each.path.name, state))
    refused = [f"{type(e.refusal).__name__}: {e.refusal}" for e in found if e.refusal is not None]
    _print([*_columns(rows, right=(0, 1, 3)), *refused])
    return 0


def show(path: Path) -> int:
    """Print a manifest and its tensors."""
    path = _checkpoint(path)
    found = reading.inspect(path)
    lines = [
        str(path),
        f"step {found.step}, saved {found.created} by {found.world} workers with Paceline"
        f" {found.paceline}; format {found.format}, {len(found.parts)} parts,"
        f" {data_size(found.num_bytes)}",
        "",
        *json.dumps(_shortened(found.content), indent=2, ensure_ascii=False).splitlines(),
        "",
    ]
    rows = [("tensor", "dtype", "shape", "size", "part")]
    for part in found.parts:
        for name, record in part.tensors.items():
            shape = "x".join(map(str, record.shape)) or "scalar"
            size = data_size(record.num_bytes)
            rows.append((name, record.dtype, shape, size, part.file.removesuffix(".safetensors")))
    _print([*lines, *_columns(rows, right=(3,))])
    return 0


def verify(path: Path, *, every: bool) -> int:
    """Check the hashes of one or all checkpoints."""
    if every and not _is_checkpoint(path):
        _require_directory(path)
        paths = [found.path for found in reading.list_checkpoints(path)]
        if not paths:
            raise CheckpointError(f"no checkpoints in {path}", path=path)
    else:
        paths = [_checkpoint(path)]
    refused = 0
    for each in paths:
        try:
            found = reading.verify(each)
        except CheckpointError as error:  # noqa: PERF203  # each iteration reads a checkpoint
            refused += 1
            _print([f"{each.name}: {type(error).__name__}: {error}"])
        else:
            _print([f"{each.name}: valid, {_counted(found)}"])
    return 1 if refused else 0


def export(path: Path, output: Path, *, model: int, force: bool) -> int:
    """Write the tensors of a model as a state_dict, atomically."""
    if output.suffix not in (".safetensors", ".pt"):
        raise UsageError(f"--output {output}: expected a name that ends in .safetensors or .pt")
    if os.path.lexists(output) and not force:
        raise UsageError(f"--output {output} exists; --force replaces it")
    prefix = "model/" if model == 0 else f"model.{model}/"
    path = _checkpoint(path)
    loaded = reading.load(path, wanted=lambda name: name.startswith(prefix))
    if not loaded.tensors:
        raise CheckpointError(
            f"{path} holds no tensors whose names begin with {prefix}: see `paceline checkpoint"
            f" show {path}`",
            path=path,
        )
    # Loaded tensors are views of a whole file, which torch.save would write with each of them.
    state = {name.removeprefix(prefix): tensor.clone() for name, tensor in loaded.tensors.items()}
    draft = output.with_name(f".{output.name}-{secrets.token_hex(4)}")
    with files.disk_errors("write", output, need_bytes=loaded.manifest.num_bytes):
        try:
            _write_state(state, draft, is_pt=output.suffix == ".pt")
            draft.rename(output)
        finally:
            draft.unlink(missing_ok=True)
    _print([f"wrote {len(state)} tensors of step {loaded.step} to {output}"])
    return 0


def _write_state(state: dict[str, Any], path: Path, *, is_pt: bool) -> None:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        if is_pt:
            torch.save(state, path)
        else:
            save_file(state, path, metadata={"format": "pt"})
    except (RuntimeError, SafetensorError) as error:  # both hide the error of the disk
        raise CheckpointError(f"cannot write {path}: {error}", path=path) from error


def _checkpoint(path: Path) -> Path:
    """Return the path itself if it is a checkpoint, else the newest one in it."""
    if _is_checkpoint(path):
        return path
    _require_directory(path)
    found = reading.list_checkpoints(path)
    if not found:
        text = f"{path} is no checkpoint (it has no {manifest.MANIFEST}) and contains none"
        raise CheckpointError(text, path=path)
    return found[0].path


def _is_checkpoint(path: Path) -> bool:
    return manifest.parse_checkpoint(path.name) is not None or (path / manifest.MANIFEST).exists()


def _require_directory(path: Path) -> None:
    if path.is_file():
        with path.open("rb") as file:
            manifest.require_no_pickle(file.read(8), path)
        raise CheckpointError(f"{path} is a file; expected a directory of checkpoints", path=path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory", path=path)


def _counted(found: Manifest) -> str:
    return f"{len(found.parts)} parts, {len(found.tensors)} tensors, {data_size(found.num_bytes)}"


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        rest = [f"... {len(value)} items"] if len(value) > _SHOWN_ITEMS else []
        return [_shortened(item) for item in value[:_SHOWN_ITEMS]] + rest
    if isinstance(value, str) and len(value) > _SHOWN_CHARACTERS:
        return f"{value[:_SHOWN_CHARACTERS]}... {len(value)} characters"
    return value


def _columns(rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _print(lines: Sequence[str]) -> None:
    for line in lines:
        sys.stdout.write("".join(c if c.isprintable() else "?" for c in line) + "\n")
