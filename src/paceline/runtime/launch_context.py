"""A process's place in its job, as the variables of its launcher tell it.

Launchers nest (torchrun inside srun is ordinary), so each one found is read, the most specific one
wins, and two that disagree about rank or world size are an error: guessing would form a job of the
wrong shape. Works on the variables that it is given (runtime/config.py reads the real ones).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from paceline.errors import ConfigError


class Launcher(NamedTuple):
    """The variables in which one launcher tells a process its place."""

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


class Place(NamedTuple):
    """Where one launcher says that a process is."""

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def launchers(environ: Mapping[str, str]) -> list[Launcher]:
    """Return the launchers whose variables are present and meant for this process, inner first."""
    found: list[Launcher] = []
    if is_present(environ, PACELINE):
        found.append(PACELINE)
    if environ.get("TORCHELASTIC_RUN_ID"):
        found.append(_TORCHRUN)
        return found  # whatever surrounds torchrun started torchrun, not us
    if is_present(environ, BY_HAND):
        found.append(BY_HAND)
    mpi = [x for x in (_OPEN_MPI, _MPICH) if environ.get(x.rank) and environ.get(x.world_size)]
    # Inside a batch script, but outside of srun, Slurm sets SLURM_PROCID=0 and the task count of
    # the whole job for what is only one process; the step id is what srun adds. And mpirun may have
    # been started by srun, whose numbers are then mpirun's own: only equal ones are about us.
    in_batch_script = "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ
    around_mpi = mpi and environ.get(_SLURM.rank) != environ.get(mpi[0].rank)
    if environ.get(_SLURM.rank) and environ.get(_SLURM.world_size):
        found += [] if in_batch_script or around_mpi else [_SLURM]
    found += mpi
    return found


def is_present(environ: Mapping[str, str], launcher: Launcher) -> bool:
    """Say whether a launcher's variables are set; ConfigError for half of them."""
    rank, world_size = environ.get(launcher.rank), environ.get(launcher.world_size)
    if bool(rank) != bool(world_size):
        have, lack = launcher.rank, launcher.world_size
        if world_size:
            have, lack = lack, have
        raise ConfigError(f"{have}={environ[have]} is set but {lack} is not; set both or neither")
    return bool(rank)


def place_of(environ: Mapping[str, str], launcher: Launcher) -> Place:
    """Read and check one launcher's four numbers."""
    rank = number_in(environ, launcher.rank, int)
    world_size = number_in(environ, launcher.world_size, int)
    if world_size < 1:
        raise ConfigError(f"{launcher.world_size}={world_size}: a job has at least 1 process")
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"{launcher.rank}={rank} is not in 0..{world_size - 1}"
            f" ({launcher.world_size}={world_size})"
        )
    local_rank, local_world_size = local_place(environ, launcher, rank, world_size)
    if not 0 <= local_rank < local_world_size <= world_size:
        raise ConfigError(
            f"{launcher.local_rank}={local_rank} and {launcher.local_world_size}="
            f"{local_world_size} do not fit {launcher.world_size}={world_size}:"
            " expected 0 <= local rank < local world size <= world size"
        )
    return Place(launcher, rank, world_size, local_rank, local_world_size)


def server_place(environ: Mapping[str, str], num_servers: int) -> Place:
    """Read a server's place: its number among the servers is PACELINE_RANK."""
    index = number_in(environ, PACELINE.rank, int)
    num_workers = number_in(environ, PACELINE.world_size, int)
    if num_workers < 1 or not 0 <= index < num_servers:
        raise ConfigError(
            f"server {index} of PACELINE_SERVERS={num_servers} for PACELINE_WORLD_SIZE="
            f"{num_workers} workers: expected 0 <= server < servers, and at least 1 worker"
        )
    return Place(PACELINE, num_workers + index, num_workers, index, num_workers)


def data_place(environ: Mapping[str, str], num_servers: int, num_data_workers: int) -> Place:
    """Read a data worker's place: its number among the data workers is PACELINE_RANK."""
    index = number_in(environ, PACELINE.rank, int)
    num_workers = number_in(environ, PACELINE.world_size, int)
    if num_workers < 1 or not 0 <= index < num_data_workers:
        raise ConfigError(
            f"data worker {index} of {num_data_workers} (PACELINE_DATA_WORKERS) for"
            f" PACELINE_WORLD_SIZE={num_workers} workers: expected 0 <= data worker < data workers,"
            " and at least 1 worker"
        )
    return Place(PACELINE, num_workers + num_servers + index, num_workers, index, num_workers)


def newcomer_place(environ: Mapping[str, str]) -> Place:
    """Read the place of a process that comes to a job under way; `local_rank` is its number."""
    rank = number_in(environ, PACELINE.rank, int)
    num_workers = number_in(environ, PACELINE.world_size, int)
    number = number_in(environ, "PACELINE_NUMBER", int)
    if num_workers < 1 or rank < 0 or number < 0:
        raise ConfigError(
            f"a newcomer with PACELINE_RANK={rank}, PACELINE_NUMBER={number} and"
            f" PACELINE_WORLD_SIZE={num_workers}: expected numbers from 0, and at least 1 worker;"
            " `paceline join` sets them"
        )
    return Place(PACELINE, rank, num_workers, number, num_workers)


def local_place(
    environ: Mapping[str, str], launcher: Launcher, rank: int, world_size: int
) -> tuple[int, int]:
    """Return (local rank, local world size); a launcher that says neither means one host."""
    if not environ.get(launcher.local_rank):
        return rank, world_size
    local_rank = number_in(environ, launcher.local_rank, int)
    if not environ.get(launcher.local_world_size):
        return local_rank, world_size
    if launcher is not _SLURM:
        return local_rank, number_in(environ, launcher.local_world_size, int)
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
    node = number_in(environ, "SLURM_NODEID", int) if environ.get("SLURM_NODEID") else 0
    if not 0 <= node < len(counts):
        raise ConfigError(f"SLURM_NODEID={node} but SLURM_TASKS_PER_NODE={text} has no such node")
    return counts[node]


def refuse_disagreement(environ: Mapping[str, str], places: list[Place]) -> None:
    """Raise ConfigError when launchers contradict each other."""
    for other in places[1:]:
        first = places[0]
        if (first.rank, first.world_size) != (other.rank, other.world_size):
            told = [
                f"{x.name} ({x.rank}={environ[x.rank]}, {x.world_size}={environ[x.world_size]})"
                for x in (first.launcher, other.launcher)
            ]
            raise ConfigError(
                f"two launchers disagree about this process: {told[0]} against {told[1]};"
                f" unset the variables of the one that did not start it"
            )


def number_in(environ: Mapping[str, str], variable: str, parse: type[int] | type[float]) -> int:
    """Read a number, as an int or as a float."""
    text = environ.get(variable, "")
    try:
        return parse(text)  # type: ignore[return-value]  # callers ask for the type they want
    except ValueError:
        kind = "an integer" if parse is int else "a number"
        raise ConfigError(f"{variable}={text!r} is not {kind}") from None
