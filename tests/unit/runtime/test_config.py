"""Which environments mean which place in the job, and which are refused."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from paceline.errors import ConfigError
from paceline.runtime.config import (
    EngineConfig,
    encryption,
    job_env,
    requested_mesh,
    requested_pace,
    runtime_dir,
    visible_devices,
)
from paceline.runtime.job_state import remote_liveness_s
from paceline.runtime.machine import process_start

PACELINE = {
    "PACELINE_RANK": "1",
    "PACELINE_WORLD_SIZE": "4",
    "PACELINE_LOCAL_RANK": "1",
    "PACELINE_LOCAL_WORLD_SIZE": "2",
    "PACELINE_ROLE": "worker",
    "PACELINE_JOB": "job-7",
    "PACELINE_COORDINATOR": "127.0.0.1:4000",
    "PACELINE_SECRET_FILE": "/run/secret",
}
TORCH = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN = TORCH | {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_NODEID": "2",
    "SLURM_JOB_ID": "99",
    "SLURM_STEP_ID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-4242@1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("environ", "source", "place"),
    [
        ({}, "alone", (0, 1, 0, 1)),
        (PACELINE, "paceline", (1, 4, 1, 2)),
        (TORCHRUN, "torchrun", (1, 4, 1, 4)),
        (TORCH, "environment", (1, 4, 1, 4)),
        ({"RANK": "1", "WORLD_SIZE": "4"}, "environment", (1, 4, 1, 4)),
        (SLURM, "slurm", (5, 7, 1, 2)),
        (SLURM | {"SLURM_PROCID": "6", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"}, "slurm",
         (6, 7, 0, 1)),
        (OPEN_MPI, "openmpi", (1, 2, 1, 2)),
        (MPICH, "mpich", (1, 2, 1, 2)),
    ],
)  # fmt: skip
def test_each_launcher_is_understood(environ, source, place):
    env = job_env(environ)
    assert env.source == source
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size) == place


def test_our_launcher_says_where_the_coordinator_is():
    env = job_env(PACELINE)
    assert (env.coordinator, env.secret_file) == ("127.0.0.1:4000", "/run/secret")
    assert env.job_id == "job-7"
    assert env.role == "worker"


def test_our_launcher_also_speaks_torchruns_form():
    env = job_env(PACELINE | TORCHRUN)
    assert (env.source, env.local_world_size) == ("paceline", 2)


@pytest.mark.parametrize("outer", [SLURM, OPEN_MPI, MPICH])
def test_torchrun_inside_another_launcher_is_the_one_that_counts(outer):
    env = job_env(TORCHRUN | outer)
    assert (env.source, env.rank, env.world_size) == ("torchrun", 1, 4)


@pytest.mark.parametrize(("inner", "name"), [(OPEN_MPI, "openmpi"), (MPICH, "mpich")])
def test_mpirun_inside_an_allocation_is_the_one_that_counts(inner, name):
    env = job_env(SLURM | inner)
    assert (env.source, env.rank, env.world_size) == (name, 1, 2)


def test_sources_that_agree_are_fine():
    env = job_env(MPICH | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"})
    assert (env.source, env.rank) == ("slurm", 1)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (TORCH | OPEN_MPI, ["environment (RANK=1, WORLD_SIZE=4)",
                            "openmpi (OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=2)"]),
        (SLURM | MPICH | {"SLURM_PROCID": "1"}, ["slurm (SLURM_PROCID=1", "mpich (PMI_RANK=1"]),
        (PACELINE | TORCH | {"RANK": "0"}, ["paceline (PACELINE_RANK=1", "environment (RANK=0"]),
    ],
)  # fmt: skip
def test_sources_that_disagree_are_both_named(environ, words):
    with pytest.raises(ConfigError) as caught:
        job_env(environ)
    for word in words:
        assert word in str(caught.value)


def test_a_batch_script_outside_of_srun_is_one_process():
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert job_env(batch).source == "alone"
    assert job_env(batch | TORCH).source == "environment"


@pytest.mark.parametrize(
    ("environ", "variable", "value"),
    [
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK", "4"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK", "-1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE", "0"),
        ({"RANK": "one", "WORLD_SIZE": "4"}, "RANK", "'one'"),
        ({"RANK": "1.5", "WORLD_SIZE": "4"}, "RANK", "'1.5'"),
        ({"RANK": "1"}, "WORLD_SIZE", "RANK=1"),
        ({"PACELINE_WORLD_SIZE": "2"}, "PACELINE_RANK", "PACELINE_WORLD_SIZE=2"),
        (TORCH | {"LOCAL_RANK": "4"}, "LOCAL_RANK", "4"),
        (TORCH | {"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE", "5"),
        (SLURM | {"SLURM_TASKS_PER_NODE": "2*3"}, "SLURM_TASKS_PER_NODE", "'2*3'"),
        (SLURM | {"SLURM_NODEID": "9"}, "SLURM_NODEID", "9"),
        ({"TORCHELASTIC_RUN_ID": "x"}, "RANK", "''"),
        ({"PACELINE_COORDINATOR": "nowhere"}, "PACELINE_COORDINATOR", "'nowhere'"),
        ({"PACELINE_COORDINATOR": "a:99999"}, "PACELINE_COORDINATOR", "'a:99999'"),
        ({"PACELINE_BIND": "0.0.0.0"}, "PACELINE_BIND", "every interface"),
        ({"PACELINE_SECRETFILE": "x"}, "PACELINE_SECRETFILE", "did you mean PACELINE_SECRET_FILE"),
        ({"PACELINE_TIMOUT_S": "9"}, "PACELINE_TIMOUT_S", "did you mean PACELINE_TIMEOUT_S"),
        ({"PACELINE_PACES": "x"}, "PACELINE_PACES", "did you mean PACELINE_PACE?"),
    ],
)
def test_bad_values_are_named(environ, variable, value):
    with pytest.raises(ConfigError) as caught:
        job_env(environ)
    assert variable in str(caught.value)
    assert value in str(caught.value)


def test_encryption_is_on_unless_another_choice_is_made():
    assert [encryption({}), encryption({"PACELINE_ENCRYPT": ""})] == ["on", "on"]
    for choice in ("on", "off", "always"):
        assert encryption({"PACELINE_ENCRYPT": choice}) == choice
    with pytest.raises(ConfigError, match="PACELINE_ENCRYPT='no': expected on, off or always"):
        encryption({"PACELINE_ENCRYPT": "no"})


def test_job_ids_tell_jobs_apart():
    restarted = TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"}
    other_step = SLURM | {"SLURM_STEP_ID": "1"}
    other_mpi = OPEN_MPI | {"PMIX_NAMESPACE": "prterun-host-4243@1"}
    environs = [TORCHRUN, restarted, SLURM, other_step, OPEN_MPI, other_mpi, MPICH, TORCH]
    ids = [job_env(environ).job_id for environ in environs]
    assert len(set(ids)) == len(ids)
    assert job_env(TORCHRUN | {"RANK": "0"}).job_id == job_env(TORCHRUN).job_id


def test_ranks_of_one_parent_agree_on_a_job_id():
    code = "from paceline.runtime.config import job_env; print(job_env().job_id)"
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), **MPICH}
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], env=environ, check=True, capture_output=True, text=True
        )
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout
    assert f"mpich-{os.getpid()}-{process_start(os.getpid())}" == runs[0].stdout.strip()


def test_hosts_are_named_alike_by_all_their_processes():
    assert job_env({}).host_id == job_env(TORCH).host_id != ""
    assert job_env({"PACELINE_HOST_ID": "other"}).host_id == "other"


def test_devices_are_requested_and_hidden_by_variables():
    assert job_env({}).devices == "auto" and visible_devices({}) == ""
    assert job_env({"PACELINE_DEVICES": "cuda:0,1"}).devices == "cuda:0,1"
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "3"}) == "CUDA_VISIBLE_DEVICES=3"


def test_process_start_knows_the_living_and_the_dead():
    child = subprocess.Popen(["true"])
    while process_start(child.pid) is not None:  # it becomes a zombie, which no longer acts
        time.sleep(0.001)
    child.wait()
    assert process_start(child.pid) is None
    assert process_start(os.getpid()) == process_start(os.getpid()) is not None


def test_runtime_dir_falls_back_when_xdg_is_of_no_use(tmp_path):
    assert runtime_dir({"XDG_RUNTIME_DIR": str(tmp_path)}) == str(tmp_path)
    assert runtime_dir({"XDG_RUNTIME_DIR": str(tmp_path / "absent")}) == runtime_dir({})


def test_the_pace_comes_from_the_environment(monkeypatch):
    assert requested_pace({}) is requested_pace({"PACELINE_PACE": " "}) is None
    assert requested_pace({"PACELINE_PACE": "allreduce "}) == "allreduce"
    monkeypatch.setenv("PACELINE_PACE", "allreduce[update=sharded]")
    assert requested_pace() == "allreduce[update=sharded]"
    job_env({"PACELINE_PACE": "allreduce"})  # a known setting


def test_engine_settings_come_from_the_environment():
    environ = {"PACELINE_TIMEOUT_S": "12.5", "PACELINE_LIVENESS_S": "128", "PACELINE_WARN_S": ""}
    config = EngineConfig.from_environ(environ)
    assert (config.timeout_s, config.liveness_s, config.warn_s) == (12.5, 128, 2.0)
    assert EngineConfig.from_environ({}) == EngineConfig()
    elastic = [remote_liveness_s(one, is_elastic=True) for one in (config, EngineConfig())]
    assert elastic == [128, EngineConfig().lease_s]  # a limit that the user has set stays
    assert remote_liveness_s(EngineConfig(), is_elastic=False) == EngineConfig().liveness_s


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TIMEOUT_S", "10 seconds"),
        ("TIMEOUT_S", "-1"),
        ("TIMEOUT_S", "nan"),
        ("LIVENESS_S", "inf"),
        ("JOIN_TIMEOUT_S", "0"),
        ("LIVENESS_S", "-1"),
        ("JOIN_TIMEOUT_S", "soon"),
    ],
)
def test_bad_engine_settings_are_named(name, value):
    with pytest.raises(ConfigError, match=f"(?i){name}"):
        EngineConfig.from_environ({f"PACELINE_{name}": value})


def test_the_mesh_is_what_was_asked_for() -> None:
    assert requested_mesh({}) is requested_mesh({"PACELINE_MESH": " "}) is None
    assert requested_mesh({"PACELINE_MESH": "dp=2,tp=2 "}) == "dp=2,tp=2"
    assert job_env({"PACELINE_MESH": "tp=2"}).mesh == "tp=2"
    assert job_env({}).mesh == ""
