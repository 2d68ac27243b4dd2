"""Processes find each other whoever started them: real processes with the launchers' variables."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading

import pytest

from paceline.control.client.local_agent import LocalAgent
from paceline.control.client.rendezvous import CoordinatorThread, establish, establish_from_store
from paceline.control.coordinator.coordinator import Coordinator
from paceline.control.transport.auth import create_secret_file, load_secret
from paceline.errors import AuthError, ConfigError, ConnectError, PortInUse, RendezvousError
from paceline.runtime.config import EngineConfig, job_env

# Joins, says so, and leaves when its stdin closes.
MEMBER = """
import os, sys
from paceline.control.member import Member
from paceline.control.client.rendezvous import establish
from paceline.runtime.config import EngineConfig, job_env
from paceline.errors import PacelineError
env = job_env()
config = EngineConfig.from_environ()
member = Member(env.rank, env.role, env.host_id, "here", os.getpid(), env.local_rank, "", "")
met = None
try:
    met = establish(env, config)
    membership = met.agent.join(member, config.join_timeout_s)
except PacelineError as error:
    if met is not None:
        met.close()
    sys.exit(f"{type(error).__name__}: {error}")
print(env.source, list(membership.ranks), met.bind_address, flush=True)
sys.stdin.read()
met.close()
"""


class Launcher:
    """Starts members with given variables, in a runtime directory of the test's own."""

    def __init__(self, runtime, stack: contextlib.ExitStack) -> None:
        self.runtime, self._stack = runtime, stack

    def start(self, **variables: str) -> subprocess.Popen:
        child = subprocess.Popen(
            [sys.executable, "-c", MEMBER],
            env={
                "PYTHONPATH": os.pathsep.join(sys.path),
                "XDG_RUNTIME_DIR": str(self.runtime),
                "PACELINE_JOIN_TIMEOUT_S": "60",
                **variables,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(self._end, child)
        return child

    @staticmethod
    def _end(child: subprocess.Popen) -> None:
        child.kill()
        child.communicate()

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.runtime.glob("paceline-*/*"))


@pytest.fixture
def launcher(tmp_path):
    with contextlib.ExitStack() as stack:
        yield Launcher(tmp_path, stack)


def without_notices(err: str) -> str:
    """What is left but for lines of those who started seconds before others, on a full machine."""
    return re.sub(r"paceline: rank \d+ waits for .* \(\d+ s so far\)\n", "", err)


def finish(children) -> list[tuple[int, str, str]]:
    """Let all leave at once; returns (exit code, stdout, stderr) of each."""
    for child in children:
        child.stdin.close()
        child.stdin = None
    outputs = [child.communicate(timeout=90) for child in children]
    return [(child.returncode, *output) for child, output in zip(children, outputs, strict=True)]


def by_hand(rank: int, world_size: int = 2) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_PORT": "1"}


LAUNCHERS = {
    "environment": lambda r: by_hand(r, 3),
    "torchrun": lambda r: by_hand(r, 3) | {"TORCHELASTIC_RUN_ID": "run"},
    "slurm": lambda r: {"SLURM_PROCID": str(r), "SLURM_NTASKS": "3", "SLURM_LOCALID": str(r),
                        "SLURM_TASKS_PER_NODE": "3", "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"},
    "openmpi": lambda r: {"OMPI_COMM_WORLD_RANK": str(r), "OMPI_COMM_WORLD_SIZE": "3",
                          "PMIX_NAMESPACE": "space"},
    "mpich": lambda r: {"PMI_RANK": str(r), "PMI_SIZE": "3"},
}  # fmt: skip


@pytest.mark.parametrize("source", LAUNCHERS)
def test_ranks_of_any_launcher_on_one_host_meet(launcher, source):
    children = [launcher.start(**LAUNCHERS[source](rank)) for rank in (2, 0, 1)]
    for code, out, err in finish(children):
        assert (code, out, without_notices(err)) == (0, f"{source} [0, 1, 2] 127.0.0.1\n", "")
    assert launcher.files == []


def test_a_job_killed_while_it_runs_leaves_no_file(launcher):
    children = [launcher.start(**by_hand(rank)) for rank in range(2)]
    for child in children:
        assert "[0, 1]" in child.stdout.readline()
        child.kill()
    assert launcher.files == []


def test_the_file_of_a_job_killed_at_its_start_is_replaced(launcher, eventually):
    killed = launcher.start(**by_hand(0))
    eventually(lambda: len(launcher.files) == 1)
    killed.kill()
    killed.wait()
    assert len(launcher.files) == 1
    late = launcher.start(**by_hand(1))  # must not fall for the old file
    for code, _, err in finish([late, launcher.start(**by_hand(0))]):
        assert (code, without_notices(err)) == (0, "")
    assert launcher.files == []


def test_the_files_of_other_killed_jobs_are_swept(launcher, eventually):
    killed = launcher.start(**by_hand(0), PACELINE_JOB="other")
    eventually(lambda: len(launcher.files) == 1)
    killed.kill()
    killed.wait()
    for code, _, _ in finish([launcher.start(**by_hand(rank)) for rank in range(2)]):
        assert code == 0
    assert launcher.files == []


def test_two_jobs_of_one_name_do_not_mix(launcher, eventually):
    first = launcher.start(**by_hand(0))
    eventually(lambda: len(launcher.files) == 1)
    ((code, _, err),) = finish([launcher.start(**by_hand(0))])
    assert code != 0
    assert (
        f"RendezvousError: rank 0 of job environment--1 is already running as pid {first.pid}"
        in err
    )


def test_a_missing_rank_0_is_named(launcher):
    ((code, _, err),) = finish([launcher.start(**by_hand(1), PACELINE_JOIN_TIMEOUT_S="4")])
    assert code != 0
    assert "paceline: rank 1 waits for rank 0 of job environment--1 to start" in err
    assert "RendezvousError: rank 1 waited 4 s for rank 0" in err


def test_a_missing_rank_ends_all_and_leaves_no_file(launcher):
    children = [
        launcher.start(**by_hand(rank, 3), PACELINE_JOIN_TIMEOUT_S="4") for rank in range(2)
    ]
    for code, _, err in finish(children):
        assert code != 0
        assert re.search(r"RendezvousError: waited \d+ s for ranks \[2\] of 3", err), err
    assert launcher.files == []


@pytest.fixture
def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


def several_hosts(rank: int, tmp_path, port: str) -> dict[str, str]:
    secret_file = next(tmp_path.glob("secret-*"), None) or create_secret_file(tmp_path)
    return by_hand(rank) | {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "PACELINE_COORDINATOR": f"127.0.0.1:{port}",
        "PACELINE_SECRET_FILE": str(secret_file),
    }


def test_several_hosts_meet_where_they_are_told_to(launcher, tmp_path, free_port):
    children = [launcher.start(**several_hosts(rank, tmp_path, free_port)) for rank in (1, 0)]
    for code, out, err in finish(children):
        assert (code, out, without_notices(err)) == (0, "environment [0, 1] 127.0.0.1\n", "")


def test_several_hosts_without_an_address_are_told_what_to_export():
    env = job_env(by_hand(1, 4) | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    with pytest.raises(ConfigError) as caught:
        establish(env, EngineConfig())
    assert "PACELINE_COORDINATOR=HOST:PORT" in str(caught.value)
    assert "PACELINE_SECRET_FILE=FILE" in str(caught.value)


def test_a_coordinator_without_a_secret_file_is_a_config_error():
    env = job_env(by_hand(1) | {"PACELINE_COORDINATOR": "127.0.0.1:1"})
    with pytest.raises(ConfigError, match="PACELINE_SECRET_FILE is not"):
        establish(env, EngineConfig())


def test_rank_0_reports_a_port_in_use(tmp_path):
    before = set(threading.enumerate())  # a test before this one may have left some
    with socket.create_server(("127.0.0.1", 0)) as taken:
        env = job_env(several_hosts(0, tmp_path, str(taken.getsockname()[1])))
        with pytest.raises(PortInUse, match=rf"pid {os.getpid()}"):
            establish(env, EngineConfig())
    new = set(threading.enumerate()) - before
    assert not any(thread.name.startswith("paceline") for thread in new)


def test_our_launchers_coordinator_is_used_as_it_is(tmp_path):
    path = create_secret_file(tmp_path)
    thread = CoordinatorThread(Coordinator("job-7", load_secret(path), 1))
    environ = {
        "PACELINE_RANK": "0",
        "PACELINE_WORLD_SIZE": "1",
        "PACELINE_JOB": "job-7",
        "PACELINE_COORDINATOR": thread.start(),
        "PACELINE_SECRET_FILE": str(path),
    }
    met = establish(job_env(environ), EngineConfig())
    assert (met.coordinator, met.published, met.secret) == (None, None, load_secret(path))
    assert met.agent.store_add("n", 1) == 1
    met.close()
    path.chmod(0o644)
    with pytest.raises(AuthError, match="mode 0644"):
        establish(job_env(environ), EngineConfig())
    path.chmod(0o600)
    thread.stop()
    with pytest.raises(ConnectError):
        establish(job_env(environ), EngineConfig(join_timeout_s=0.2))


def test_one_process_needs_neither_socket_nor_thread(make_member):
    before = (len(os.listdir("/proc/self/fd")), threading.active_count())
    met = establish(job_env({}), EngineConfig())
    assert isinstance(met.agent, LocalAgent)
    assert met.agent.join(make_member(0)).ranks == (0,)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    met.close()


class SharedTable:
    """A store of the kind that torch.distributed hands to a backend."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, 30)
            return self._values[key]


def test_ranks_meet_through_a_store_that_they_share(make_member):
    table, ranks = SharedTable(), {}

    def run(rank: int) -> None:
        met = establish_from_store(table, rank, 3)
        ranks[rank] = met.agent.join(make_member(rank), 30).ranks
        met.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (1, 2, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ranks == {rank: (0, 1, 2) for rank in range(3)}


@pytest.mark.parametrize("value", ["", "{}", '{"address": "a:1", "secret_hex": "zz"}'])
def test_a_store_with_something_else_under_our_key_is_refused(value):
    table = SharedTable()
    table.set("paceline/rendezvous", value)
    with pytest.raises(RendezvousError, match="'paceline/rendezvous'"):
        establish_from_store(table, 1, 2)
