"""How each contender's ranks are started: ours, gloo, and those that may or may not be installed.

All get one thread per rank and no pinning. Optional ones live in virtual environments of their own
below one directory (see README.md); a missing one is skipped with a line.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.ranks import Process, RankSet

# MPI's launchers and TensorFlow open ports on whatever interface they find, and Open MPI's refuses
# loopback; so they get a network of their own, with an interface that leads nowhere.
_PRIVATE_NETWORK = (
    "ip link set lo up && ip link add d0 type veth peer name d1 && ip addr add 10.99.0.1/24 dev d0"
    ' && ip link set d0 up && exec "$@"'
)


def paceline(world: int, scratch: Path) -> RankSet:
    """Our own interface, Group."""
    return _one_process_per_rank("paceline", "paceline", world, scratch)


def paceline_torch(world: int, scratch: Path) -> RankSet:
    """Our backend under torch.distributed."""
    return _one_process_per_rank("paceline-torch", "torch-paceline", world, scratch)


def gloo(world: int, scratch: Path) -> RankSet:
    return _one_process_per_rank("gloo", "torch-gloo", world, scratch)


def with_servers(num_workers: int, num_servers: int) -> Process:
    """Return our launcher, which starts workers and parameter servers."""
    command = [sys.executable, "-m", "paceline", "run", "-n", str(num_workers)]
    return Process([*command, "-s", str(num_servers)])


def in_private_network(name: str, command: Sequence[str]) -> list[str]:
    """Return the command in its own network namespace, where no other process reaches its ports."""
    unshare = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
    return [*unshare, "sh", "-c", _PRIVATE_NETWORK, name, *command]


def optional(peers: Path, world: int, scratch: Path) -> tuple[list[RankSet], list[str]]:
    """Start those that are installed; return them, and a line for each that is not."""
    makers = {"openmpi": _open_mpi, "mpich": _mpich, "deepspeed": _deepspeed}
    started: list[RankSet] = []
    skipped: list[str] = []
    for name, maker in makers.items():
        venv = peers / name
        if (venv / "bin" / "python").exists():
            started.append(maker(venv.absolute(), world, scratch))
        else:
            skipped.append(f"{name}: skipped, no environment at {venv} (bench/README.md says how)")
    return started, skipped


def rank_variables(rank: int, world: int, scratch: Path, name: str) -> dict[str, str]:
    """Return the environment that gives one process its rank, as most programs expect it."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "BENCH_STORE": str(scratch / f"{name}.store"),
    }


def _one_process_per_rank(
    name: str,
    kind: str,
    world: int,
    scratch: Path,
    *,
    python: str = sys.executable,
    extra: Mapping[str, str] | None = None,
    leaves_behind: str = "",
) -> RankSet:
    # Two runs at once must not meet. DeepSpeed names its memory by this port; none listens there.
    job = uuid.uuid4()
    port = str(20000 + job.int % 40000)
    shared = {"MASTER_PORT": port, "PACELINE_JOB": f"bench-{job.hex}"}
    places = [rank_variables(rank, world, scratch, name) for rank in range(world)]
    processes = [Process([python], {**place, **shared, **(extra or {})}) for place in places]
    pattern = leaves_behind.format(port=port)
    return RankSet(name, kind, world, processes, scratch, leaves_behind=pattern)


def _deepspeed(venv: Path, world: int, scratch: Path) -> RankSet:
    extra = {
        "LOCAL_SIZE": str(world),
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(venv / "torch_extensions"),  # built there on first use
        "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    python = str(venv / "bin" / "python")
    return _one_process_per_rank(
        "deepspeed",
        "deepspeed",
        world,
        scratch,
        python=python,
        extra=extra,
        leaves_behind="deepspeed_allreduce_buffer_*_{port}_*",
    )


def _open_mpi(venv: Path, world: int, scratch: Path) -> RankSet:
    env = {"OMPI_MCA_btl": "self,sm", "OMPI_MCA_pml": "ob1"}
    if world > (os.cpu_count() or 1):
        env["OMPI_MCA_mpi_yield_when_idle"] = "1"
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(world)]
    return _under_mpi(
        "openmpi", venv, [str(venv / "bin" / "mpirun"), *options], env, world, scratch
    )


def _mpich(venv: Path, world: int, scratch: Path) -> RankSet:
    options = ["-launcher", "fork", "-iface", "lo", "-n", str(world)]
    return _under_mpi("mpich", venv, [str(venv / "bin" / "mpiexec"), *options], {}, world, scratch)


def _under_mpi(
    name: str, venv: Path, launcher: list[str], env: dict[str, str], world: int, scratch: Path
) -> RankSet:
    argv = in_private_network(name, [*launcher, str(venv / "bin" / "python")])
    return RankSet(name, "mpi", world, [Process(argv, env)], scratch)
