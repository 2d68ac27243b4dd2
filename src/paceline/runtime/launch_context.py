"""The launch context of a process: rank and world size, from the variables of its launcher.

Launchers nest (torchrun inside srun is ordinary), so all of them are read and the most specific one
wins. If two disagree about rank or world size, that is an error: guessing would form a job of the
wrong size. These functions take the environment as an argument (runtime/config.py reads the real
one).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from paceline.errors import ConfigError


class Launcher(NamedTuple):
    """The variables in which one launcher passes rank and world size."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


TORCH_STYLE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
PACELINE = Launcher("paceline", *(f"PACELINE_{name}" for name in TORCH_STYLE))
_TORCHRUN = Launcher("torchrun", *TORCH_STYLE)
BY_HAND = Launcher("environment", *TORCH_STYLE)
_SLURM = Launcher("slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE")
_OPEN_MPI = Launcher(
    "openmpi", *(f"OMPI_COMM_WORLD_{x}" for x in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
)
_MPICH = Launcher("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


class LaunchContext(NamedTuple):
    """Rank and world size of a process, according to one launcher."""

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    number: int | None = None  # within its role; None: its rank


def find_launchers(environ: Mapping[str, str]) -> list[Launcher]:
    """Return the launchers whose variables are set and meant for this process, innermost first."""
    found: list[Launcher] = []
    if is_present(environ, PACELINE):
        found.append(PACELINE)
    if environ.get("TORCHELASTIC_RUN_ID"):
        found.append(_TORCHRUN)
        return found  # an outer launcher started torchrun, not this process
    if is_present(environ, BY_HAND):
        found.append(BY_HAND)
    mpi = [x for x in (_OPEN_MPI, _MPICH) if environ.get(x.rank) and environ.get(x.world_size)]
    # Inside a batch script, but outside of srun, Slurm sets SLURM_PROCID=0 and the task count of
    # the whole job although there is one process; only srun adds the step id. If srun started
    # mpirun, its numbers are mpirun's own: they are about this process only if both are equal.
    in_batch_script = "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ
    around_mpi = mpi and environ.get(_SLURM.rank) != environ.get(mpi[0].rank)
    if environ.get(_SLURM.rank) and environ.get(_SLURM.world_size):
        found += [] if in_batch_script or around_mpi else [_SLURM]
    found += mpi
    return found


def is_present(environ: Mapping[str, str], launcher: Launcher) -> bool:
    """Return whether a launcher's variables are set; ConfigError if only one of them is."""
    rank, world_size = environ.get(launcher.rank), environ.get(launcher.world_size)
    if bool(rank) != bool(world_size):
        have, lack = launcher.rank, launcher.world_size
        if world_size:
            have, lack = lack, have
        raise ConfigError(f"{have}={environ[have]} is set but {lack} is not; set both or neither")
    return bool(rank)


def read_context(environ: Mapping[str, str], launcher: Launcher) -> LaunchContext:
    """Return one launcher's four numbers, checked."""
    rank = parse_number(environ, launcher.rank, int)
    world_size = parse_number(environ, launcher.world_size, int)
    if world_size < 1:
        raise ConfigError(f"{launcher.world_size}={world_size}: a job has at least 1 process")
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"{launcher.rank}={rank} is not in 0..{world_size - 1}"
            f" ({launcher.world_size}={world_size})"
        )
    local_rank, local_world_size = local_ranks(environ, launcher, rank, world_size)
    if not 0 <= local_rank < local_world_size <= world_size:
        raise ConfigError(
            f"{launcher.local_rank}={local_rank} and {launcher.local_world_size}="
            f"{local_world_size} do not fit {launcher.world_size}={world_size}:"
            " expected 0 <= local rank < local world size <= world size"
        )
    return LaunchContext(launcher, rank, world_size, local_rank, local_world_size)


def server_context(environ: Mapping[str, str], num_servers: int) -> LaunchContext:
    """Return a server's context: its number among the servers is PACELINE_RANK."""
    index = parse_number(environ, PACELINE.rank, int)
    num_workers = parse_number(environ, PACELINE.world_size, int)
    if num_workers < 1 or not 0 <= index < num_servers:
        raise ConfigError(
            f"server {index} of PACELINE_SERVERS={num_servers} for PACELINE_WORLD_SIZE="
            f"{num_workers} workers: expected 0 <= server < servers, and at least 1 worker"
        )
    return LaunchContext(PACELINE, num_workers + index, num_workers, index, num_workers, index)


def data_worker_context(
    environ: Mapping[str, str], num_servers: int, num_data_workers: int
) -> LaunchContext:
    """Return a data worker's context: its number among the data workers is PACELINE_RANK."""
    index = parse_number(environ, PACELINE.rank, int)
    num_workers = parse_number(environ, PACELINE.world_size, int)
    if num_workers < 1 or not 0 <= index < num_data_workers:
        raise ConfigError(
            f"data worker {index} of {num_data_workers} (PACELINE_DATA_WORKERS) for"
            f" PACELINE_WORLD_SIZE={num_workers} workers: expected 0 <= data worker < data workers,"
            " and at least 1 worker"
        )
    return LaunchContext(
        PACELINE, num_workers + num_servers + index, num_workers, index, num_workers, index
    )


def data_worker_counts(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Parse PACELINE_DATA_WORKERS: "2,1" are two for the first stage, one for the second."""
    text = environ.get("PACELINE_DATA_WORKERS", "")
    counts = text.split(",") if text else []
    if not all(count.isdecimal() and int(count) > 0 for count in counts):
        raise ConfigError(
            f"PACELINE_DATA_WORKERS={text!r}: expected numbers above 0, as in 2 or 2,1"
        )
    return tuple(map(int, counts))


def newcomer_context(environ: Mapping[str, str]) -> LaunchContext:
    """Return the context of a process that joins a running job."""
    rank = parse_number(environ, PACELINE.rank, int)
    num_workers = parse_number(environ, PACELINE.world_size, int)
    number = parse_number(environ, "PACELINE_NUMBER", int)
    if num_workers < 1 or rank < 0 or number < 0:
        raise ConfigError(
            f"a newcomer with PACELINE_RANK={rank}, PACELINE_NUMBER={number} and"
            f" PACELINE_WORLD_SIZE={num_workers}: expected numbers from 0, and at least 1 worker;"
            " `paceline join` sets them"
        )
    local = local_ranks(environ, PACELINE, number, num_workers)
    return LaunchContext(PACELINE, rank, num_workers, *local, number)


def local_ranks(
    environ: Mapping[str, str], launcher: Launcher, rank: int, world_size: int
) -> tuple[int, int]:
    """Return (local rank, local world size); a launcher that sets neither means one host."""
    if not environ.get(launcher.local_rank):
        return rank, world_size
    local_rank = parse_number(environ, launcher.local_rank, int)
    if not environ.get(launcher.local_world_size):
        return local_rank, world_size
    if launcher is not _SLURM:
        return local_rank, parse_number(environ, launcher.local_world_size, int)
    return local_rank, _slurm_tasks_here(environ)


def _slurm_tasks_here(environ: Mapping[str, str]) -> int:
    """Expand '2(x3),1' (three nodes with 2 tasks, one with 1) and pick this node's count."""
    variable = "SLURM_STEP_TASKS_PER_NODE"
    text = environ.get(variable) or environ[_SLURM.local_world_size]
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"{_SLURM.local_world_size}={text!r}: expected a form like '2(x3),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    node = parse_number(environ, "SLURM_NODEID", int) if environ.get("SLURM_NODEID") else 0
    if not 0 <= node < len(counts):
        raise ConfigError(f"SLURM_NODEID={node} but SLURM_TASKS_PER_NODE={text} has no such node")
    return counts[node]


def require_agreement(environ: Mapping[str, str], contexts: list[LaunchContext]) -> None:
    """Raise ConfigError if launchers contradict each other."""
    for other in contexts[1:]:
        first = contexts[0]
        if (first.rank, first.world_size) != (other.rank, other.world_size):
            values = [
                f"{x.name} ({x.rank}={environ[x.rank]}, {x.world_size}={environ[x.world_size]})"
                for x in (first.launcher, other.launcher)
            ]
            raise ConfigError(
                f"two launchers disagree about this process: {values[0]} against {values[1]};"
                f" unset the variables of the one that did not start it"
            )


def parse_number(environ: Mapping[str, str], variable: str, parse: type[int] | type[float]) -> int:
    """Return the number in a variable, as an int or as a float."""
    text = environ.get(variable, "")
    try:
        return parse(text)  # type: ignore[return-value]  # callers ask for the type they want
    except ValueError:
        kind = "an integer" if parse is int else "a number"
        raise ConfigError(f"{variable}={text!r} is not {kind}") from None
