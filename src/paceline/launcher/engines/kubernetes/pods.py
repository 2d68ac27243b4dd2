"""Inside of the cluster: the pods of the job, as the coordinator's pod gets them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from paceline.errors import ConfigError
from paceline.launcher.hosts.host_list import MAX_SLOTS, HostSlots

PODS = "PACELINE_PODS"  # name:slots,... ; a pod for servers has no slot
JOB = "PACELINE_POD_JOB"  # the name of the job in Kubernetes
SECRET_FILE = "PACELINE_POD_SECRET_FILE"  # where the Secret is mounted
PORT = 29417  # where pods wait for the launcher
_POD = re.compile(r"([a-z0-9][a-z0-9.-]{0,252}):([0-9]{1,4})")


def pods_text(hosts: Sequence[HostSlots]) -> str:
    """Return the value of PACELINE_PODS."""
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def kubernetes_hosts(environ: Mapping[str, str]) -> tuple[HostSlots, ...]:
    """Return the pods of the job around this process; () if it is no coordinator's pod."""
    text = environ.get(PODS, "")
    slots: dict[str, int] = {}
    for word in text.split(",") if text else []:
        match = _POD.fullmatch(word)
        if match is None or int(match[2]) > MAX_SLOTS:
            raise ConfigError(
                f"{PODS}={text[:80]!r}: expected pods as `paceline run --on kubernetes` writes"
                " them, for example train-worker-0-0.train:1"
            )
        slots[match[1]] = int(match[2])
    return pods_as_hosts(slots)


def pods_as_hosts(slots: Mapping[str, int]) -> tuple[HostSlots, ...]:
    """Return pods as hosts. If some are for servers, no other pod has a server."""
    if all(slots.values()):
        return tuple(HostSlots(name, count) for name, count in slots.items())
    return tuple(
        HostSlots(name, count, server_slots=int(count == 0)) for name, count in slots.items()
    )
