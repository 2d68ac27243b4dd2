"""The environment of every process of a job that a test starts, as the launcher would give it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from paceline.control.client.rendezvous import CoordinatorThread
from paceline.control.coordinator.coordinator import Coordinator
from paceline.control.transport.auth import create_secret_file, load_secret
from paceline.observe.telemetry.events import Event

Hosts = int | Sequence[int]


@contextlib.contextmanager
def encrypting_as(env: Mapping[str, str]) -> Iterator[None]:
    """Let this process encrypt as the ranks do: its coordinator has to agree with them."""
    before = os.environ.get("PACELINE_ENCRYPT")
    if "PACELINE_ENCRYPT" in env:
        os.environ["PACELINE_ENCRYPT"] = env["PACELINE_ENCRYPT"]
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PACELINE_ENCRYPT", None)
        else:
            os.environ["PACELINE_ENCRYPT"] = before


@contextlib.contextmanager
def job_environs(
    world_size: int,
    hosts: Hosts = 1,
    env: Mapping[str, str] | None = None,
    servers: int = 0,
    on_event: Callable[[Event], None] | None = None,
    data_workers: Sequence[int] = (),
) -> Iterator[list[dict[str, str]]]:
    """Run a coordinator, as the launcher does; yield the environment of every process.

    What processes report about themselves is given to `on_event`, in the coordinator's thread.

    Workers come first, then the servers, then the data workers. `hosts` is a number of hosts, over
    which all of them are spread one after the other, or the host of each process. Those that
    pretend to be on different hosts do not share memory and talk over TCP.
    """
    num_processes = world_size + servers + sum(data_workers)
    host_of = _placement(num_processes, hosts)
    with tempfile.TemporaryDirectory(prefix=f"paceline-test-{os.getpid()}-") as directory:
        secret_file = create_secret_file(Path(directory))
        secret = load_secret(secret_file)
        limits = env or {}
        with encrypting_as(limits):
            coordinator = CoordinatorThread(
                Coordinator(
                    f"test-{os.path.basename(directory)}",
                    secret,
                    num_processes,
                    float(limits.get("PACELINE_JOIN_TIMEOUT_S", 30)),
                    on_event,
                    liveness_s=float(limits.get("PACELINE_LIVENESS_S", 5)),
                )
            )
        address = coordinator.start()
        try:
            yield [
                {
                    **base_environ(directory),
                    **_place(rank, world_size, servers, host_of),
                    **_data_place(rank - world_size - servers, world_size, data_workers),
                    "PACELINE_COORDINATOR": address,
                    "PACELINE_JOB": f"test-{os.path.basename(directory)}",
                    "PACELINE_SECRET_FILE": str(secret_file),
                    **({"PACELINE_HOST_ID": f"h{host_of[rank]}"} if len(set(host_of)) > 1 else {}),
                    **limits,
                }
                for rank in range(num_processes)
            ]
        finally:
            coordinator.stop()


def _place(rank: int, world_size: int, servers: int, host_of: Sequence[int]) -> dict[str, str]:
    if rank >= world_size:
        return {
            "PACELINE_ROLE": "server",
            "PACELINE_RANK": str(rank - world_size),
            "PACELINE_WORLD_SIZE": str(world_size),
            "PACELINE_SERVERS": str(servers),
        }
    workers = host_of[:world_size]
    return {
        "PACELINE_RANK": str(rank),
        "PACELINE_WORLD_SIZE": str(world_size),
        "PACELINE_LOCAL_RANK": str(workers[:rank].count(host_of[rank])),
        "PACELINE_LOCAL_WORLD_SIZE": str(workers.count(host_of[rank])),
        **({"PACELINE_SERVERS": str(servers)} if servers else {}),
    }


def _data_place(number: int, world_size: int, data_workers: Sequence[int]) -> dict[str, str]:
    counts = {"PACELINE_DATA_WORKERS": ",".join(map(str, data_workers))} if data_workers else {}
    if number < 0:
        return counts
    return {**counts, "PACELINE_ROLE": "data", "PACELINE_RANK": str(number)}


def _placement(world_size: int, hosts: Hosts) -> list[int]:
    if isinstance(hosts, int):
        return [rank * hosts // world_size for rank in range(world_size)]
    assert len(hosts) == world_size, f"{len(hosts)} hosts for {world_size} ranks"
    return list(hosts)


def base_environ(directory: str) -> dict[str, str]:
    """The test session's environment, without what a launcher or a person may have set in it."""
    foreign = ("PACELINE_", "SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_", "RANK", "WORLD_SIZE")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    return {**kept, "TMPDIR": directory, "XDG_RUNTIME_DIR": directory}
