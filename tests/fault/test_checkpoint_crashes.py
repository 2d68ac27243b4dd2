"""A save that is killed, or refused by the disk, at any system call leaves a valid checkpoint.

A process with torch loaded saves over an older checkpoint and then removes that one, with strace
between it and the kernel: each call in turn is the one at which it is killed, or which fails. The
short versions take some of the calls, the slow ones all.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from paceline.errors import CheckpointError
from paceline.state.files import load as reading
from paceline.state.files import manifest
from paceline.state.files import save as writing
from support.checkpoints import bits, save
from support.traced import Call, calls_of, needs_strace, run_injected

# Calls that cannot fail with an error of a disk, or whose failure is none of ours.
NOT_THE_DISKS = {"mmap", "munmap", "brk", "futex", "rt_sigprocmask", "rt_sigaction", "getrandom"}
NOT_THE_DISKS |= {"getpid", "gettid", "madvise", "mprotect", "mremap", "uname", "clock_nanosleep"}
NOT_THE_DISKS |= {"chdir", "getuid", "geteuid", "getegid", "getgid", "sched_yield", "umask"}


OLD, NEW, NEXT = 1, 2, 3  # which save a checkpoint comes from; steps may be equal


def tensors_of(which: int) -> tuple[dict[str, torch.Tensor], ...]:
    return (
        {"model/a": torch.full((40,), float(which)), "model/b": torch.arange(9).view(3, 3).t()},
        {"rank.1/rng": torch.full((100,), which, dtype=torch.uint8)},
    )


def saving(root: str, step: int) -> Callable[[], tuple[str, str, str | None]]:
    """Prepare a process; return the save: what it has come to, the message, the path in it."""
    save(Path(root) / "elsewhere", 1)  # everything is imported
    writing.retain(Path(root) / "elsewhere", 1)
    shutil.rmtree(Path(root) / "elsewhere")
    tensors = tensors_of(NEW)

    def run() -> tuple[str, str, str | None]:
        staging = Path(root) / f".saving-{step:09d}-nonce" / "checkpoint"
        try:
            writing.begin(Path(root), step, "nonce")
            for number, part in enumerate(tensors):
                record = writing.write_part(staging, number, part)
                writing.write_record(staging, number, record)
            left = writing.collect_records(staging, range(len(tensors)))
            parts = [each.record for each in left.values() if each.record is not None]
            made = manifest.make(step=step, world=2, content={"which": NEW}, parts=parts)
            writing.publish(staging, made)
        except CheckpointError as error:
            writing.abandon(staging)
            return "refused", str(error), error.path
        try:
            writing.retain(Path(root), 1)
        except CheckpointError as error:
            return "kept too many", str(error), error.path
        return "saved", "", None

    return run


def assert_valid(root: Path, *saves: int) -> int:
    """The newest valid checkpoint is whole and that of one of these saves; return which."""
    loaded = reading.newest(root).loaded
    assert loaded is not None
    which = loaded.content["which"]
    assert which in saves
    expected = {name: t for part in tensors_of(which) for name, t in part.items()}
    assert loaded.tensors.keys() == expected.keys()
    assert all(bits(loaded.tensors[name]) == bits(t) for name, t in expected.items())
    for found in reading.list_checkpoints(root):
        assert found.refusal is None, "nothing half written has the name of a checkpoint"
    assert isinstance(which, int)
    return which


@pytest.fixture
def fresh() -> Iterator[Callable[[], Path]]:
    """Make directories that hold one checkpoint, of step 100; in memory, where a sync is quick."""
    with TemporaryDirectory(dir="/dev/shm", prefix="paceline-crashes-") as name:
        directory = Path(name)
        save(directory / "begin", 100, tensors_of(OLD), {"which": OLD})
        count = 0

        def make() -> Path:
            nonlocal count
            count += 1
            shutil.rmtree(directory / f"{count - 1}", ignore_errors=True)
            return Path(shutil.copytree(directory / "begin", directory / f"{count}"))

        yield make


def killed_at(calls: Sequence[Call], fresh: Callable[[], Path], step: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for call in calls:
        root = fresh()
        outcome = run_injected(call, "signal=KILL", saving, str(root), step)
        assert outcome.status == -9, f"{call}: {outcome}"
        seen["new" if assert_valid(root, OLD, NEW) == NEW else "old"] += 1
        writing.sweep(root)
        for left in root.glob(".saving-*"):  # killed before it could say whose that is
            assert not list(left.glob("checkpoint/*"))
            os.utime(left, (0, 0))
            for inside in left.iterdir():
                os.utime(inside, (0, 0))
            writing.sweep(root)
        assert not list(root.glob(".*")), call
        save(root, step, tensors_of(NEXT), {"which": NEXT})
        assert_valid(root, NEXT)
    return seen


def failed_at(
    calls: Sequence[Call], error: str, fresh: Callable[[], Path], step: int
) -> Counter[str]:
    seen: Counter[str] = Counter()
    for call in calls:
        root = fresh()
        outcome = run_injected(call, f"error={error}", saving, str(root), step)
        assert outcome.status == 0 and outcome.error is None, f"{call}: {outcome}"
        came_to, text, path = outcome.value
        seen[came_to] += 1
        valid = assert_valid(root, OLD, NEW)
        if came_to == "refused":
            assert not list(root.glob(".saving-*")), f"{call}: {outcome}"
        else:
            assert valid == NEW
            writing.sweep(root)  # only what was being removed may be left
        if came_to != "saved":
            assert str(root) in text and path is not None and path.startswith(str(root)), call
            assert os.strerror(getattr(errno, error)) in text, call
        assert not list(root.glob(".saving-*")), f"{call}: {outcome}"
    return seen


def some(calls: Sequence[Call], every: int) -> list[Call]:
    """The calls around each one that changes what others see, and some of the rest."""
    turns = [at for at, call in enumerate(calls) if call.name in ("rename", "rmdir")]
    near = {at + more for at in turns for more in (0, 1, 2)}
    return [call for at, call in enumerate(calls) if at in near or at % every == 0]


def of_the_disk(calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if call.name not in NOT_THE_DISKS]


@needs_strace
def test_killed_at_some_calls(fresh):
    calls = calls_of(saving, str(fresh()), 200)
    assert {"rename", "fsync", "write", "mkdir", "rmdir", "unlinkat"} < {c.name for c in calls}
    seen = killed_at(some(calls, 20), fresh, 200)
    assert seen.keys() == {"old", "new"}, "some came before the rename, some after it"


@needs_strace
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", [200, 100], ids=["a new step", "the same step again"])
def test_killed_at_every_call(step, fresh, record_property):
    calls = calls_of(saving, str(fresh()), step)
    seen = killed_at(calls, fresh, step)
    record_property("crash points", dict(seen))
    print(f"\nSIGKILL, step {step}: {len(calls)} calls, {dict(seen)}")
    assert seen.total() == len(calls) > 100


@needs_strace
def test_some_calls_fail(fresh):
    calls = of_the_disk(calls_of(saving, str(fresh()), 200))
    writing_calls = [call for call in calls if call.name in ("write", "fsync", "rename", "openat")]
    seen = failed_at(writing_calls[::3], "ENOSPC", fresh, 200)
    seen += failed_at(some(calls, 30), "EIO", fresh, 200)
    assert seen["refused"] and seen["saved"]


@needs_strace
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("error", ["ENOSPC", "EIO", "EDQUOT"])
def test_every_call_fails(error, fresh, record_property):
    calls = of_the_disk(calls_of(saving, str(fresh()), 200))
    seen = failed_at(calls, error, fresh, 200)
    record_property("failed calls", dict(seen))
    print(f"\n{error}: {len(calls)} calls, {dict(seen)}")
    assert seen.total() == len(calls) > 100


@needs_strace
def test_everything_is_on_the_disk_before_the_rename_and_the_rename_before_the_end(fresh):
    """What SIGKILL cannot show: that a checkpoint also survives the machine."""
    calls = calls_of(saving, str(fresh()), 200)
    (renamed,) = [
        at for at, c in enumerate(calls) if c.name == "rename" and "/step-000000200" in c.rest
    ]
    synced = [c.rest.split(">")[0] for c in calls[:renamed] if c.name == "fsync"]
    for name in ("part-00000.safetensors", "part-00001.safetensors", "manifest.json", "checkpoint"):
        assert any(path.endswith(f"/{name}") for path in synced), name
    last_write = max(at for at, c in enumerate(calls[:renamed]) if c.name == "write")
    assert calls[last_write + 1].name == "fsync" and "manifest.json" in calls[last_write + 1].rest
    after = [c for c in calls[renamed:] if c.name in ("fsync", "rmdir", "unlinkat")]
    assert after[0].name == "fsync" and re.search(r"/\d+>", after[0].rest), "the root's directory"


def loading(root: str) -> Callable[[], tuple[str, str]]:
    """Prepare a process; return the loading of the newest: what it is, or why there is none."""
    assert reading.newest(Path(root)).loaded is not None  # everything is imported

    def run() -> tuple[str, str]:
        try:
            found = reading.newest(Path(root))
        except CheckpointError as error:
            return "refused", str(error)
        assert found.loaded is not None
        return str(found.loaded.content["which"]), "; ".join(found.notices)

    return run


def read_failing(calls: Sequence[Call], root: Path) -> Counter[str]:
    seen: Counter[str] = Counter()
    for call in calls:
        outcome = run_injected(call, "error=EIO", loading, str(root))
        assert outcome.status == 0 and outcome.error is None, f"{call}: {outcome}"
        came_to, text = outcome.value
        seen[came_to] += 1
        assert came_to == str(NEW) or os.strerror(errno.EIO) in text, call
        assert (came_to == str(NEW)) == (text == ""), call
    return seen


@needs_strace
@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.slow)])
def test_a_disk_that_fails_while_it_is_read(every, fresh):
    """Another checkpoint is taken, which is said, or the disk's error is told as one of ours."""
    root = fresh()
    save(root, 200, tensors_of(NEW), {"which": NEW})
    calls = of_the_disk(calls_of(loading, str(root)))
    seen = read_failing(calls[::every], root)
    print(f"\nEIO while loading: {dict(seen)}")
    assert seen[str(OLD)] and seen["refused"]
