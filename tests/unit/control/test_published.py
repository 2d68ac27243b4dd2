"""The private file is private: directories and files that others could touch are refused."""

from __future__ import annotations

import os
import stat

import msgspec
import pytest

from paceline.control.client.rendezvous import CoordinatorInfo, publish, wait_for
from paceline.errors import AuthError, RendezvousError
from paceline.runtime.config import job_env
from paceline.runtime.machine import process_start

ENV = job_env({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"})
SECRET = bytes(range(32))


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / f"paceline-{os.getuid()}"


def test_what_is_published_is_found_and_private(directory):
    published = publish(ENV, "127.0.0.1:5", SECRET)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(published.path.stat().st_mode) == 0o600
    found = wait_for(ENV, 1)
    assert (found.address, found.secret, found.pid) == ("127.0.0.1:5", SECRET, os.getpid())
    assert len(list(directory.iterdir())) == 1
    published.remove()
    published.remove()
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o711])
def test_a_directory_that_others_can_enter_is_refused(directory, mode):
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(AuthError, match=rf"mode 0700, found uid \d+ and mode 0{mode:o}"):
        publish(ENV, "127.0.0.1:5", SECRET)


def test_a_link_in_place_of_the_directory_is_refused(directory, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    directory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AuthError, match="must be a directory"):
        publish(ENV, "127.0.0.1:5", SECRET)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(directory):
    directory.mkdir(mode=0o700)
    os.chown(directory, 12345, -1)
    with pytest.raises(AuthError, match="found uid 12345"):
        wait_for(ENV, 0.1)


def leave_behind(directory, contents: CoordinatorInfo) -> None:
    """Put a file where the job of ENV expects one."""
    path = publish(ENV, "127.0.0.1:5", SECRET).path
    path.write_bytes(msgspec.json.encode(contents))


@pytest.mark.parametrize(
    "pid_start", [(os.getpid(), "1"), (2**22 + 1, "1")], ids=["reused", "gone"]
)
def test_a_stale_file_is_ignored_by_readers_and_replaced_by_rank_0(directory, pid_start):
    leave_behind(directory, CoordinatorInfo("127.0.0.1:4", SECRET.hex(), *pid_start))
    with pytest.raises(RendezvousError, match="waited 0.1 s for rank 0"):
        wait_for(ENV, 0.1)
    publish(ENV, "127.0.0.1:5", SECRET)
    assert wait_for(ENV, 1).address == "127.0.0.1:5"


def test_a_live_file_is_not_replaced(directory):
    start = process_start(1)
    leave_behind(directory, CoordinatorInfo("127.0.0.1:4", SECRET.hex(), 1, start))
    with pytest.raises(RendezvousError, match="already running as pid 1"):
        publish(ENV, "127.0.0.1:5", SECRET)
    assert len(list(directory.iterdir())) == 1


def test_an_unreadable_file_is_replaced(directory):
    path = publish(ENV, "127.0.0.1:5", SECRET).path
    path.write_text("not ours")
    publish(ENV, "127.0.0.1:6", SECRET)
    assert wait_for(ENV, 1).address == "127.0.0.1:6"


def test_a_file_that_others_can_read_is_refused(directory):
    publish(ENV, "127.0.0.1:5", SECRET).path.chmod(0o644)
    with pytest.raises(AuthError, match="mode 0644"):
        wait_for(ENV, 1)
