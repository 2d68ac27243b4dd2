"""What is kept, what is removed, and whose saves are left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from paceline.errors import CheckpointError, UsageError
from paceline.state.files import load as reading
from paceline.state.files import save as writing
from paceline.state.files import staging
from support.checkpoints import PARTS, save


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def damage(path: Path) -> None:
    (path / "part-00000.safetensors").unlink()


def test_the_newest_are_kept(tmp_path):
    paths = [save(tmp_path, step) for step in (5, 20, 100, 1_000_000_000)]
    assert writing.retain(tmp_path, 4) == []
    assert writing.retain(tmp_path, 2) == [paths[1], paths[0]]
    assert names(tmp_path) == ["step-000000100", "step-1000000000"]
    assert writing.retain(tmp_path, 1) == [paths[2]]
    with pytest.raises(UsageError, match="keep=0"):
        writing.retain(tmp_path, 0)


def test_the_one_just_saved_is_kept_though_others_have_higher_steps(tmp_path):
    paths = [save(tmp_path, step) for step in (200, 300, 400)]
    saved = save(tmp_path, 250)
    assert writing.retain(tmp_path, 3, saved=saved) == [paths[0]]
    assert writing.retain(tmp_path, 1, saved=saved) == [paths[2], paths[1]]
    again = save(tmp_path, 250)
    assert writing.retain(tmp_path, 1, saved=again) == [saved]


def test_what_is_damaged_displaces_nothing(tmp_path):
    paths = [save(tmp_path, step) for step in (1, 2, 3, 4, 5)]
    for at in (0, 3, 4):
        damage(paths[at])
    assert writing.retain(tmp_path, 1) == [paths[1], paths[0]]
    loaded = reading.newest(tmp_path).loaded
    assert loaded is not None and loaded.step == 3


def test_a_step_that_is_saved_again_wins(tmp_path):
    first = save(tmp_path, 7, PARTS, {"attempt": 1})
    second = save(tmp_path, 7, PARTS, {"attempt": 2})
    third = save(tmp_path, 7, PARTS, {"attempt": 3})
    assert [path.name for path in (first, second, third)] == [
        "step-000000007",
        "step-000000007.2",
        "step-000000007.3",
    ]
    loaded = reading.newest(tmp_path).loaded
    assert loaded is not None and loaded.content == {"attempt": 3}
    assert writing.retain(tmp_path, 5) == [second, first], "one of each step"
    assert save(tmp_path, 7).name == "step-000000007.4"


def test_a_damaged_repetition_does_not_displace_the_first(tmp_path):
    first = save(tmp_path, 7)
    damage(save(tmp_path, 7))
    writing.retain(tmp_path, 1)
    loaded = reading.newest(tmp_path).loaded
    assert loaded is not None and loaded.path == first


def test_saves_of_living_processes_stay(tmp_path):
    mine = writing.begin(tmp_path, 3, "mine")
    code = f"""
from pathlib import Path
from paceline.state.files import save as writing
writing.begin(Path({str(tmp_path)!r}), 4, "theirs")
writing.begin(Path({str(tmp_path)!r}), 3, "mine")
print("begun", flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"begun\n"
        assert writing.sweep(tmp_path) == []
        other.kill()
        other.wait()
    assert [path.name for path in writing.sweep(tmp_path)] == [".saving-000000004-theirs"]
    assert mine.is_dir() and writing.sweep(tmp_path) == [], "one of its owners is this process"
    writing.abandon(mine)
    writing.abandon(mine)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "is_dead"),
    [
        ({}, False),
        ({"start": "1"}, True),  # its number has gone to another process
        ({"boot": "another"}, True),
        ({"host": "another", "boot": "another"}, False),  # cannot be known
        ({"pid_namespace": 1, "start": "1"}, False),  # cannot be known
    ],
)
def test_whose_saves_are_dead(change, is_dead, tmp_path):
    outer = writing.begin(tmp_path, 3, "x").parent
    (mark,) = outer.glob("owner-*")
    owner = msgspec.structs.replace(staging.SaveOwner.here(), **change)
    mark.write_bytes(msgspec.json.encode(owner))
    assert staging.is_dead(outer) is is_dead
    for path in (mark, outer / "checkpoint", outer):
        os.utime(path, (0, 0))
    assert staging.is_dead(outer), "untouched for a day"


def test_what_others_put_there_stays(tmp_path):
    for name in (".git", ".saving-x", ".saving-000000001-", "notes", "step-1", ".deletingx"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / ".deleting-file").touch()
    (tmp_path / ".deleting-link").symlink_to(tmp_path / "notes")
    before = names(tmp_path)
    (tmp_path / ".deleting-step-000000001-abc").mkdir()
    assert [path.name for path in writing.sweep(tmp_path)] == [".deleting-step-000000001-abc"]
    assert names(tmp_path) == before
    assert writing.sweep(tmp_path / "no") == []


def test_links_in_the_place_of_a_save_are_not_used(tmp_path):
    (tmp_path / "away").mkdir()
    (tmp_path / ".saving-000000001-x").symlink_to(tmp_path / "away")
    with pytest.raises(CheckpointError, match="Not a directory"):
        writing.begin(tmp_path, 1, "x")
    assert not list((tmp_path / "away").iterdir())


def test_only_staging_directories_are_abandoned(tmp_path):
    for path in (tmp_path, tmp_path / "checkpoint", tmp_path / ".saving-x" / "checkpoint"):
        path.mkdir(parents=True, exist_ok=True)
        with pytest.raises(UsageError, match="not a staging directory"):
            writing.abandon(path)
        assert path.exists()
