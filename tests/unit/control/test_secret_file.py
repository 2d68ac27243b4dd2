"""A secret file is private or it is refused, by name and mode."""

from __future__ import annotations

import os
import stat

import pytest

from paceline.control.transport.auth import create_secret_file, load_secret
from paceline.errors import AuthError


def test_a_new_secret_is_private_and_different_each_time(tmp_path):
    one, other = create_secret_file(tmp_path), create_secret_file(tmp_path)
    assert stat.S_IMODE(one.stat().st_mode) == 0o600
    assert len(load_secret(one)) == 32
    assert load_secret(one) != load_secret(other)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_can_use_is_refused(tmp_path, mode):
    path = create_secret_file(tmp_path)
    path.chmod(mode)
    with pytest.raises(AuthError, match=rf"{path} has mode 0{mode:o}.*0600"):
        load_secret(path)


@pytest.mark.parametrize("content", ["", "secret", "ab" * 31, "ab" * 33, "xy" * 32, "\xff\xfe"])
def test_a_malformed_secret_is_refused(tmp_path, content):
    path = tmp_path / "secret"
    path.write_bytes(content.encode("latin-1"))
    path.chmod(0o600)
    with pytest.raises(AuthError, match="64 hexadecimal digits"):
        load_secret(path)


def test_what_is_no_file_is_refused_without_hanging(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(AuthError, match="not a regular file"):
        load_secret(pipe)
    with pytest.raises(AuthError, match=r"absent cannot be read: No such file"):
        load_secret(tmp_path / "absent")
    with pytest.raises(AuthError, match="cannot be read|not a regular file"):
        load_secret(tmp_path)


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path):
    path = create_secret_file(tmp_path)
    os.chown(path, 12345, -1)
    with pytest.raises(AuthError, match="belongs to uid 12345"):
        load_secret(path)
