"""The options of `paceline run` for Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.launcher.engines.ray.request import RayRequest

Resources = Annotated[
    str | None,
    typer.Option(
        "--resources",
        metavar="NAME=AMOUNT,...",
        help="With --on ray: what each worker and each server needs; default: CPU=1.",
    ),
]
Strategy = Annotated[
    str | None,
    typer.Option(
        "--placement",
        metavar="pack|spread",
        help="With --on ray: put workers on few nodes or on many; default: pack.",
    ),
]
Wait = Annotated[
    float | None,
    typer.Option(
        "--wait",
        metavar="S",
        help="With --on ray: seconds until the cluster must have room for the job; default: 60.",
    ),
]
_NOT_TOGETHER = {
    "hosts": "Ray chooses the nodes",
    "hostfile": "Ray chooses the nodes",
    "servers_on": "Ray chooses the nodes",
    "detach": "use `ray job submit --no-wait` to run a job in the background",
}


def check(values: dict[str, Any]) -> RayRequest | None:
    """Return what is asked of Ray, if the job is for it; raises ConfigError."""
    # Not at the top: `paceline --version` loads no launcher.
    from paceline.launcher.engines.ray.request import RayRequest, is_for_ray

    if is_for_ray(values["on"]):
        for name, why in _NOT_TOGETHER.items():
            if values[name]:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"--on ray and {option}: {why}; leave out {option}")
        given = (values["resources"], values["placement"], values["wait"])
        return RayRequest.parse(values["on"], *given)
    for name in ("resources", "placement", "wait"):
        if values[name] is not None:
            raise ConfigError(f"--{name} is for --on ray; add that, or leave out --{name}")
    return None
