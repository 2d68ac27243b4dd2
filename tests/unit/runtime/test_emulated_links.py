"""A job whose links are emulated by pacing: only where `paceline run` was asked for it."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError, UsageError
from paceline.runtime.emulated_links import VARIABLE, EmulatedLinks, require_emulated_host


def test_the_file_says_what_was_asked(tmp_path):
    made = EmulatedLinks.create(tmp_path / "links", 3, 12.5e6, 5e-3)
    assert EmulatedLinks.read(made.path) == made
    assert "3 hosts of one worker each, 100 Mbit/s, 5 ms one way" in made.text
    assert "pacing in the engine" in made.text


def test_a_server_is_on_the_host_of_the_worker_beside_it(tmp_path):
    links = EmulatedLinks.create(tmp_path / "links", 2, 12.5e6, 0.0)
    hosts = [links.host_id("machine", rank) for rank in range(4)]  # 2 workers, 2 servers
    assert hosts[:2] == hosts[2:] and hosts[0] != hosts[1]
    require_emulated_host(links.path, hosts[0])


def test_a_variable_that_was_left_behind_is_an_error_and_not_a_slow_job(tmp_path):
    assert EmulatedLinks.of_job({}, has_hosts=True) is None
    with pytest.raises(UsageError, match=f"No such file.*unset {VARIABLE}"):
        EmulatedLinks.of_job({VARIABLE: str(tmp_path / "gone")}, has_hosts=False)
    with pytest.raises(ConfigError, match="their links are real"):
        EmulatedLinks.of_job({VARIABLE: "any"}, has_hosts=True)
    with pytest.raises(ConfigError, match="`paceline run` starts"):
        require_emulated_host("any", "a host of its own")
