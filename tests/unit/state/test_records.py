"""How the workers of a save tell the one who publishes that their parts are there."""

from __future__ import annotations

import threading
import time

import pytest

from paceline.errors import CheckpointError, UsageError
from paceline.state.files import load as reading
from paceline.state.files import manifest
from paceline.state.files import save as writing
from support.checkpoints import PARTS


def test_records_are_waited_for(tmp_path):
    staging = writing.begin(tmp_path, 1, "nonce")

    def late() -> None:
        time.sleep(0.1)
        record = writing.write_part(staging, 1, PARTS[1])
        writing.write_record(staging, 1, record, {"rng": [1, 2]})

    writing.write_record(staging, 0, writing.write_part(staging, 0, PARTS[0]), None)
    thread = threading.Thread(target=late)
    thread.start()
    left = writing.collect_records(staging, [0, 1], wait_s=30)
    thread.join()
    assert list(left) == [0, 1]
    assert left[1].plain == {"rng": [1, 2]}
    assert left[0].record is not None and left[0].record.file == "part-00000.safetensors"


def test_who_is_missing_or_has_failed_is_named(tmp_path):
    staging = writing.begin(tmp_path, 1, "nonce")
    writing.write_record(staging, 0, writing.write_part(staging, 0, PARTS[0]))
    with pytest.raises(CheckpointError, match="parts 1, 2 of 3 were not written after 0 s"):
        writing.collect_records(staging, [0, 1, 2])
    writing.write_failure(staging, 2, "rank 2: no space left")
    with pytest.raises(CheckpointError, match="part 2: rank 2: no space left"):
        writing.collect_records(staging, [0, 1, 2], wait_s=60)


def test_an_abandoned_save_is_not_waited_for(tmp_path):
    staging = writing.begin(tmp_path, 1, "nonce")
    timer = threading.Timer(0.1, writing.abandon, [staging])
    timer.start()
    with pytest.raises(CheckpointError, match=r"was abandoned before parts \[0\] were written"):
        writing.collect_records(staging, [0], wait_s=100)
    timer.join()


def test_publishing_wants_the_files_that_the_manifest_names(tmp_path):
    staging = writing.begin(tmp_path, 1, "nonce")
    parts = [writing.write_part(staging, number, part) for number, part in enumerate(PARTS)]
    made = manifest.make(step=1, world=2, content={}, parts=parts[:1])
    with pytest.raises(UsageError, match="part-00001"):
        writing.publish(staging, made)
    both = manifest.make(step=1, world=2, content={}, parts=parts)
    file = staging / "part-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="part-00001.safetensors has 132 bytes"):
        writing.publish(staging, both)
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot publish without .*part-00001"):
        writing.publish(staging, both)
    assert reading.list_checkpoints(tmp_path) == []


def test_bad_numbers_and_nonces(tmp_path):
    for step, nonce in ((-1, "a"), (1, ""), (1, "a/b"), (1, "x" * 65), (1, "..")):
        with pytest.raises(UsageError, match="nonce"):
            writing.begin(tmp_path, step, nonce)
    staging = writing.begin(tmp_path, 1, "nonce")
    for number in (-1, 100_000):
        with pytest.raises(ValueError, match="part"):
            writing.write_part(staging, number, PARTS[0])
    with pytest.raises(UsageError, match="plain of part 0"):
        writing.write_record(staging, 0, writing.write_part(staging, 0, PARTS[0]), {"a": object()})
