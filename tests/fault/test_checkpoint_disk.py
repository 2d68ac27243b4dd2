"""Disks that are full, read-only or not ours: said with sizes, and nothing of the save is left."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from paceline.errors import CheckpointError
from paceline.state.files import durable_files as files
from paceline.state.files import load as reading
from paceline.state.files import save as writing
from support.checkpoints import save

MB = 1 << 20
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="mounting a file system needs root")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB with a checkpoint of 3 MB on it."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"tmpfs cannot be mounted: {done.stderr.decode()}")
    try:
        save(tmp_path / "runs", 1, ({"model/a": torch.zeros(3 * MB, dtype=torch.uint8)},))
        yield tmp_path / "runs"
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def refused(root: Path, act: Callable[[Path], object]) -> CheckpointError:
    """It refuses, nothing is left of it, and what was there is still valid."""
    staging = writing.begin(root, 2, "nonce")
    with pytest.raises(CheckpointError) as told:
        act(staging)
    writing.abandon(staging)
    assert [path.name for path in root.iterdir()] == ["step-000000001"]
    loaded = reading.newest(root).loaded
    assert loaded is not None and loaded.step == 1
    assert type(told.value) is CheckpointError and told.value.path is not None
    return told.value


@needs_root
@pytest.mark.root
def test_what_cannot_fit_is_not_begun(small_disk):
    big = {"model/a": torch.zeros(6 * MB, dtype=torch.uint8)}
    error = refused(small_disk, lambda staging: writing.write_part(staging, 0, big))
    assert re.match(r"need 6\.\d+ MB, 5\.\d+ MB free on /.*/checkpoint; make room", str(error))


@needs_root
@pytest.mark.root
def test_a_disk_that_becomes_full_while_it_is_written(small_disk):
    """As with a quota, or another program that writes: there was room before."""

    def write(staging: Path) -> None:
        pieces = [bytes(2 * MB)] * 3
        files.write_new(staging / "part-00000.safetensors", pieces, need_bytes=6 * MB)

    error = refused(small_disk, write)
    pattern = r"cannot write .*/part-00000.safetensors: No space left on device: need 6.29 MB, "
    assert re.match(pattern + r"\S+ \w+ free on /", str(error))


@needs_root
@pytest.mark.root
def test_a_record_that_does_not_fit(small_disk):
    def fill(staging: Path) -> None:
        record = writing.write_part(staging, 0, {"model/a": torch.zeros(3)})
        with open(small_disk.parent / "other", "wb") as other, pytest.raises(OSError):
            while True:
                other.write(bytes(1 << 16))
                other.flush()
        writing.write_record(staging, 0, record)

    assert "No space left on device" in str(refused(small_disk, fill))


@needs_root
@pytest.mark.root
def test_a_read_only_disk(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk.parent)], check=True)
    with pytest.raises(CheckpointError, match="Read-only file system") as told:
        writing.begin(small_disk, 2, "nonce")
    assert str(small_disk) in str(told.value)


def test_a_root_that_is_a_file_or_below_one(tmp_path):
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(CheckpointError, match="Not a directory") as told:
            writing.begin(root, 1, "nonce")
        assert str(tmp_path / "file") in str(told.value)
