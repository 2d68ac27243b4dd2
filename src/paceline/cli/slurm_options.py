"""The options of `paceline run` for Slurm, and the submission of a job."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import ConfigError

On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="slurm|ray[://HOST:PORT]|kubernetes|local",
        help="slurm: submit the job to Slurm; ray: run on the nodes of a Ray cluster; kubernetes:"
        " run in pods of --image; local: use this host only, also inside an allocation of Slurm."
        " Default: the allocation, if there is one.",
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option(
        "-N", "--nodes", metavar="N", help="With --on slurm: number of nodes; kubernetes: pods."
    ),
]
Time = Annotated[
    str | None,
    typer.Option(
        "--time", metavar="H:MM:SS", help="With --on slurm: time limit, as sbatch reads it."
    ),
]
Partition = Annotated[
    str | None, typer.Option("--partition", metavar="P", help="With --on slurm: the partition.")
]
Sbatch = Annotated[
    list[str] | None,
    typer.Option(
        "--sbatch",
        metavar="OPTION",
        help="With --on slurm: another option of sbatch, such as --sbatch=--account=physics;"
        " repeatable.",
    ),
]
# Parameters that are for the submission only.
_OWN = {"on", "nodes", "time", "partition", "sbatch", "dry_run"}
_NOT_TOGETHER = {
    "hosts": "Slurm chooses the nodes",
    "hostfile": "Slurm chooses the nodes",
    "servers_on": "the names of the nodes are not known yet",
    "sync": "the nodes of a cluster share its directories",
    "detach": "the job runs in the background anyway",
}


def check(values: dict[str, Any]) -> bool:
    """Return whether the job is for Slurm's queue; raises ConfigError for what does not fit."""
    on = values["on"]
    from paceline.launcher.engines.ray.request import is_for_ray  # not for `paceline --version`

    if on not in (None, "slurm", "kubernetes", "local") and not is_for_ray(on):
        raise ConfigError(f"--on {on[:40]!r}: expected slurm, ray, kubernetes or local")
    if on == "kubernetes":
        return False
    if on == "slurm":
        for name, why in _NOT_TOGETHER.items():
            if values[name]:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"--on slurm and {option}: {why}; leave out {option}")
        return True
    for name in ("nodes", "time", "partition", "sbatch"):
        if values[name]:
            option = "-N" if name == "nodes" else f"--{name}"
            raise ConfigError(f"{option} is for --on slurm; add that, or leave out {option}")
    if on == "local" and (values["hosts"] or values["hostfile"]):
        raise ConfigError("--on local and a list of hosts contradict each other; give one of them")
    return False


def request(values: dict[str, Any], num_workers: int | None, script: str) -> Any:
    """Return what is asked of Slurm."""
    from paceline.launcher.engines.slurm_script import SlurmRequest

    num_nodes = 1 if values["nodes"] is None else values["nodes"]
    return SlurmRequest(
        name=Path(script).stem or "paceline",
        num_nodes=num_nodes,
        num_workers=num_nodes if num_workers is None else num_workers,
        time=values["time"],
        partition=values["partition"],
        options=tuple(values["sbatch"] or ()),
    )


def submit(context: typer.Context, asked: Any) -> int:
    """Submit the job, or print its batch script with --dry-run; raises LaunchError."""
    from paceline.launcher.engines import slurm_script

    values = context.params
    activation = values["activate"]
    python = values["python"] or ("python" if activation is not None else sys.executable)
    text = slurm_script.batch_script(asked, python, arguments(context, _OWN), activation)
    if values["dry_run"]:
        sys.stdout.write(text)
    else:
        typer.echo(slurm_script.submit(text, asked.name))
    return 0


def arguments(context: typer.Context, without: Collection[str]) -> list[str]:
    """Return the words of `paceline run` inside of the job, `without` the options around it."""
    from paceline.launcher.engines.slurm_script import GRACE_S

    words: list[str] = []
    for parameter in context.command.params:
        name, value = parameter.name, context.params.get(parameter.name or "")
        source = context.get_parameter_source(name or "")
        if parameter.param_type_name != "option" or name in without:
            continue
        if source is None or source.name == "DEFAULT":
            continue
        option = parameter.opts[0]
        if getattr(parameter, "is_flag", False):
            words += [option] if value else []
            continue
        for one in value if isinstance(value, (list, tuple)) else [value]:
            words += [f"{option}={one}"] if option.startswith("--") else [option, str(one)]
    if "grace_s" not in {name for name in context.params if _is_given(context, name)}:
        words.append(f"--grace={GRACE_S}")
    return [*words, context.params["script"], *(context.params["arguments"] or ())]


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"
