"""The options of `paceline run` for Kubernetes, and the creation of a job there."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import ConfigError, LaunchError

Image = Annotated[
    str | None,
    typer.Option(
        "--image",
        metavar="IMAGE",
        help="With --on kubernetes: the image, with Paceline and the script.",
    ),
]
Flavour = Annotated[
    str | None,
    typer.Option(
        "--flavour",
        metavar="auto|jobset|job|trainjob",
        help="With --on kubernetes: the kind of objects; default: a JobSet if the cluster has it,"
        " else an Indexed Job.",
    ),
]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", metavar="NAME", help="With --on kubernetes: the namespace."),
]
Name = Annotated[
    str | None,
    typer.Option(
        "--name", metavar="NAME", help="With --on kubernetes: name of the job; default: a new one."
    ),
]
Cpus = Annotated[
    str | None,
    typer.Option("--cpus", metavar="N", help="With --on kubernetes: CPUs of each pod; default: 1."),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="SIZE", help="With --on kubernetes: of each pod; default: 4Gi."
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option("--gpus", metavar="N", help="With --on kubernetes: GPUs of each worker's pod."),
]
Volumes = Annotated[
    list[str] | None,
    typer.Option(
        "--volume",
        metavar="CLAIM:PATH",
        help="With --on kubernetes: a PersistentVolumeClaim for all pods; repeatable.",
    ),
]
Secret = Annotated[
    str | None,
    typer.Option(
        "--secret",
        metavar="NAME",
        help="With --on kubernetes: a Secret that exists, with 64 hexadecimal digits under the key"
        " `secret`; default: a new one.",
    ),
]
Retries = Annotated[
    int | None,
    typer.Option(
        "--retries",
        metavar="N",
        help="With --on kubernetes: how often each pod that was killed is replaced; default: 3.",
    ),
]
Output = Annotated[
    str | None,
    typer.Option(
        "-o",
        "--output",
        metavar="yaml|json",
        help="With --on kubernetes: print the manifests in this format, and create nothing.",
    ),
]
# Parameters that are for the manifests only. `nodes` is -N: the number of pods with workers.
OWN = (
    *("image", "flavour", "namespace", "name", "cpus", "memory", "gpus", "volume", "secret"),
    *("retries", "output"),
)
NOT_IN_PODS = {*OWN, "on", "nodes", "dry_run", "python"}
_NOT_TOGETHER = {
    "hosts": "the pods are the hosts",
    "hostfile": "the pods are the hosts",
    "servers_on": "servers have pods of their own",
    "sync": "all pods have the image",
    "detach": "the job runs in the cluster anyway",
    "activate": "set PATH in the image, or name the interpreter with --python",
    "time": "that is for --on slurm",
    "partition": "that is for --on slurm",
    "sbatch": "that is for --on slurm",
}


def check(values: dict[str, Any]) -> bool:
    """Return whether the job is for Kubernetes; raises ConfigError for what does not fit."""
    if values["on"] != "kubernetes":
        for name in OWN:
            if values[name]:
                option = "-o" if name == "output" else f"--{name}"
                raise ConfigError(
                    f"{option} is for --on kubernetes; add that, or leave out {option}"
                )
        return False
    for name, why in _NOT_TOGETHER.items():
        if values[name]:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"--on kubernetes and {option}: {why}; leave out {option}")
    if not values["image"]:
        raise ConfigError(
            "--on kubernetes without --image: the pods need an image with Paceline and the script,"
            " for example --image registry.example.org/team/train:1"
        )
    if values["output"] not in (None, "yaml", "json"):
        raise ConfigError(f"-o {values['output'][:40]!r}: expected yaml or json")
    return True


def request(
    values: dict[str, Any], num_workers: int | None, script: str, arguments: list[str]
) -> Any:
    """Return what is asked of Kubernetes; raises ConfigError."""
    from paceline.launcher.engines.kubernetes import request as k8s
    from paceline.launcher.engines.slurm_script import GRACE_S
    from paceline.launcher.job_size import plan_servers

    count = values["nodes"] or 1 if num_workers is None else num_workers
    planned = plan_servers(values["servers"], num_workers=count, replicas=1, threads=None)
    chosen = {
        name: values[name]
        for name in ("cpus", "memory", "gpus", "retries", "python")
        if values[name] is not None
    }
    given_grace = values["grace_s"] if f"--grace={GRACE_S}" not in arguments else GRACE_S
    asked = k8s.KubernetesRequest(
        name=k8s.new_name(Path(script).stem) if values["name"] is None else values["name"],
        image=values["image"],
        num_workers=count,
        num_worker_pods=count if values["nodes"] is None else values["nodes"],
        num_server_pods=0 if planned.is_colocated else planned.count,
        flavour=_chosen_flavour(values) or "jobset",
        namespace=values["namespace"],
        volumes=tuple(k8s.Volume.parse(text) for text in values["volume"] or ()),
        secret=values["secret"],
        grace_s=given_grace,
        arguments=tuple(arguments),
        **chosen,
    )
    # Only now: what is wrong by itself is refused without a cluster.
    return replace(asked, flavour=_chosen_flavour(values) or _found_flavour(values))


def _chosen_flavour(values: dict[str, Any]) -> str | None:
    return None if values["flavour"] == "auto" else values["flavour"]


def _found_flavour(values: dict[str, Any]) -> str:
    """Return the flavour that the cluster has."""
    from paceline.launcher.engines.kubernetes.kubectl import installed_flavour
    from paceline.runtime.console import say

    try:
        return installed_flavour()
    except LaunchError as error:
        if not _prints(values):
            raise
        say(f"no cluster was asked, so this is a JobSet ({error}); see --flavour")
        return "jobset"


def _prints(values: dict[str, Any]) -> bool:
    return bool(values["dry_run"] or values["output"])


def submit(context: typer.Context, asked: Any) -> int:
    """Create the job, or print its manifests; raises LaunchError."""
    from paceline.launcher.engines.kubernetes import kubectl
    from paceline.launcher.engines.kubernetes.manifests import as_json, as_yaml, manifests

    values = context.params
    objects = manifests(asked)
    if _prints(values):
        text = as_json(objects) if values["output"] == "json" else as_yaml(objects)
        sys.stdout.write(text)
    else:
        typer.echo(kubectl.create(asked, objects))
    return 0
