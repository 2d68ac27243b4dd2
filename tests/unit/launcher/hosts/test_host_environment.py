"""The environment of a process on one of several hosts, and what travels there."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.launcher.environment import HostSettings, JobAddresses, process_environ
from paceline.launcher.hosts.host_environment import (
    environ_on_host,
    sent_environ,
    travelling_settings,
)
from paceline.launcher.hosts.host_list import parse_hosts
from paceline.launcher.hosts.placement import HostPlace
from paceline.launcher.job_size import ElasticPlan, ServerPlan
from paceline.launcher.spec import RunSpec
from paceline.runtime.config import job_env
from paceline.runtime.process_names import ProcessName

WHERE = JobAddresses(job_id="j", coordinator="10.0.0.9:7", secret_file="f", master_port=1)


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    script = tmp_path / "train.py"
    script.write_text("")
    return RunSpec(
        target=str(script),
        num_workers=6,
        servers=ServerPlan(count=2),
        data_workers=(2,),
        env={"LR": "0.1"},
        hosts=parse_hosts("a:4,b:4"),
    )


def settings(spec: RunSpec, name: ProcessName, cores: int = 8) -> HostSettings:
    assert spec.placement is not None
    place = spec.placement.place(name)
    address = f"10.0.0.{place.host_index + 1}"
    return HostSettings(place=place, address=address, master_address="10.0.0.1", cores=cores)


def environ_of(spec: RunSpec, number: int, base: dict[str, str] | None = None) -> dict[str, str]:
    name = spec.process_names[number]
    return sent_environ(base or {}, spec, name, WHERE, settings(spec, name))


def test_a_worker_knows_its_rank_on_its_host(spec: RunSpec) -> None:
    environ = environ_of(spec, 5)
    for name, value in {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "PACELINE_LOCAL_RANK": "1",
        "PACELINE_LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "PACELINE_BIND": "10.0.0.2",
        "OMP_NUM_THREADS": "4",  # 8 cores, 2 workers
        "LR": "0.1",
    }.items():
        assert environ[name] == value, name
    env = job_env(environ)
    assert (env.rank, env.local_rank, env.local_world_size) == (5, 1, 2)
    assert env.bind_address == "10.0.0.2" and env.number == 5
    assert environ_of(spec, 0)["OMP_NUM_THREADS"] == "2"


def test_servers_and_data_workers_listen_on_the_address_of_their_host(spec: RunSpec) -> None:
    server, data_worker = environ_of(spec, 7), environ_of(spec, 9)
    assert server["PACELINE_BIND"] == data_worker["PACELINE_BIND"] == "10.0.0.2"
    assert "MASTER_ADDR" not in server
    assert (job_env(server).number, job_env(server).role) == (1, "server")
    assert (job_env(data_worker).number, job_env(data_worker).role) == (1, "data")
    assert data_worker["LOCAL_RANK"] == "2"  # after the workers of its host


def test_a_newcomer_has_a_number_and_a_local_rank_of_its_own(spec: RunSpec) -> None:
    newcomer = ProcessName(12, 5, is_newcomer=True)
    host = HostSettings(
        place=HostPlace(1, 3, 0, 2), address="10.0.0.2", master_address="10.0.0.1", cores=8
    )
    env = job_env(sent_environ({}, spec, newcomer, WHERE, host))
    assert (env.rank, env.number, env.local_rank, env.local_world_size) == (12, 5, 0, 2)
    assert env.is_newcomer


def test_the_option_and_an_exported_variable_win_over_the_cores_of_the_host(spec: RunSpec) -> None:
    assert environ_of(spec, 0, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"


def test_only_settings_travel() -> None:
    base = {
        "PATH": "/here/bin",
        "HOME": "/home/me",
        "LD_LIBRARY_PATH": "/here/lib",
        "RANK": "3",
        "SLURM_PROCID": "3",
        "PACELINE_RANK": "3",
        "PACELINE_BIND": "10.0.0.9",
        "PACELINE_HOST_ID": "mine",
        "PACELINE_LOG_DIR": "/here/runs",
        "PACELINE_TIMEOUT_S": "60",
        "PACELINE_PACE": "local:8",
        "OMP_NUM_THREADS": "2",
    }
    assert travelling_settings(base) == {
        "PACELINE_TIMEOUT_S": "60",
        "PACELINE_PACE": "local:8",
        "OMP_NUM_THREADS": "2",
    }


def test_the_host_keeps_its_own_paths_and_takes_all_settings_from_the_launcher() -> None:
    own = {
        "PATH": "/there/bin",
        "PACELINE_PACE": "ps",
        "PACELINE_HOST_ID": "x",
        "SLURM_PROCID": "1",
    }
    sent = {"PACELINE_RANK": "0", "LR": "0.1"}
    assert environ_on_host(own, sent) == {"PATH": "/there/bin", "PACELINE_RANK": "0", "LR": "0.1"}


def test_encryption_is_turned_off_in_every_process(spec: RunSpec, tmp_path: Path) -> None:
    assert "PACELINE_ENCRYPT" not in environ_of(spec, 0)
    plain = RunSpec(target=spec.target, num_workers=2, hosts=parse_hosts("a:2"), encrypt=False)
    assert environ_of(plain, 1, {"PACELINE_ENCRYPT": "on"})["PACELINE_ENCRYPT"] == "off"


def test_a_job_on_one_host_is_as_before(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    elastic = ElasticPlan(min_workers=1, max_workers=4)
    spec = RunSpec(target=str(script), num_workers=2, elastic=elastic)
    environ = process_environ({}, spec, ProcessName(4, 1, is_newcomer=True), WHERE, cores=4)
    assert environ["MASTER_ADDR"] == "127.0.0.1" and "PACELINE_BIND" not in environ
    assert (environ["GROUP_RANK"], environ["GROUP_WORLD_SIZE"]) == ("0", "1")
    env = job_env(environ)
    assert (env.rank, env.number, env.local_rank, env.local_world_size) == (4, 1, 1, 2)
