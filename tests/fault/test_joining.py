"""Jobs that cannot be formed: every process is told why, and nobody waits longer than it must."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

import paceline as pl
from paceline.control.transport.auth import create_secret_file
from support.environs import base_environ, job_environs
from support.ranks import run_processes

WHO_IS_THERE = {"PACELINE_JOIN_TIMEOUT_S": "5"}  # all have come by then, on a busy machine too


def join(_number: int) -> str:
    """Join; return the number of ranks, or the error with its class."""
    try:
        pl.init()
    except pl.errors.PacelineError as error:
        return f"{type(error).__name__}: {error}"
    return str(pl.world().size)


def test_a_rank_that_is_missing() -> None:
    with job_environs(3, env=WHO_IS_THERE) as environs:
        outcomes = run_processes(join, [environs[0], environs[2]])
    for outcome in outcomes:
        assert outcome.error is None, outcome
        assert outcome.value.startswith("RendezvousError"), outcome
        assert "for ranks [1] of 3" in outcome.value, outcome


def test_a_rank_that_is_claimed_twice() -> None:
    with job_environs(2, env=WHO_IS_THERE) as environs:
        outcomes = run_processes(join, [environs[0], environs[0]])
    assert all(o.error is None for o in outcomes), outcomes
    twice = [o.value for o in outcomes if "twice" in o.value or "claimed" in o.value]
    assert len(twice) == 1 and twice[0].startswith("RendezvousError: rank 0"), outcomes
    assert socket.gethostname() in twice[0]  # and who the other one is


def test_a_wrong_secret(tmp_path: Path) -> None:
    with job_environs(2, env=WHO_IS_THERE) as environs:
        other = str(create_secret_file(tmp_path))
        environs[1]["PACELINE_SECRET_FILE"] = other
        outcomes = run_processes(join, environs)
    assert outcomes[1].value.startswith("AuthError") and other in outcomes[1].value, outcomes[1]
    assert outcomes[0].value.startswith("RendezvousError") and "[1]" in outcomes[0].value
    for outcome in outcomes:
        assert Path(other).read_bytes().hex() not in outcome.output + outcome.value


def test_a_secret_that_others_can_read() -> None:
    with job_environs(1) as environs:
        os.chmod(environs[0]["PACELINE_SECRET_FILE"], 0o644)
        [outcome] = run_processes(join, environs)
    assert outcome.value.startswith("AuthError") and "644" in outcome.value, outcome


def test_a_coordinator_that_is_not_there() -> None:
    env = {"PACELINE_JOIN_TIMEOUT_S": "1"}
    with socket.socket() as sock, job_environs(2, env=env) as environs:
        sock.bind(("127.0.0.1", 0))  # nobody else has the port, and nobody listens there
        port = sock.getsockname()[1]
        for environ in environs:
            environ["PACELINE_COORDINATOR"] = f"127.0.0.1:{port}"
        outcomes = run_processes(join, environs)
    for outcome in outcomes:
        assert outcome.value.startswith("ConnectError"), outcome
        assert f"127.0.0.1:{port}" in outcome.value, outcome


def test_a_port_in_use(tmp_path: Path) -> None:
    secret = str(create_secret_file(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        environ = {
            **base_environ(str(tmp_path)),
            "RANK": "0",
            "WORLD_SIZE": "2",
            "PACELINE_COORDINATOR": f"127.0.0.1:{port}",
            "PACELINE_SECRET_FILE": secret,
        }
        [outcome] = run_processes(join, [environ])
    assert outcome.value.startswith("PortInUse") and str(port) in outcome.value, outcome


def test_two_jobs_by_hand_at_once_never_meet(tmp_path: Path) -> None:
    """The file rendezvous: no launcher of ours, two jobs that differ in MASTER_PORT only."""
    environs = [
        {
            **base_environ(str(tmp_path)),
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for port, size in ((12345, 2), (12346, 3))
        for rank in range(size)
    ]
    outcomes = run_processes(join, environs)
    assert [o.value for o in outcomes] == ["2", "2", "3", "3", "3"], outcomes
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert left == []


@pytest.mark.parametrize("bad", [{"PACELINE_RANK": "7"}, {"PACELINE_WORLD_SIZE": "0"}])
def test_numbers_that_make_no_sense(bad: dict[str, str]) -> None:
    with job_environs(2) as environs:
        environs[0].update(bad)
        [outcome] = run_processes(join, environs[:1])
        assert outcome.value.startswith("ConfigError"), outcome
        [(name, value)] = bad.items()
        assert f"{name}={value}" in outcome.value
