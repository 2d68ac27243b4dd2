"""One pod of a job: its command, its files, what it may do, and how kubelet looks at it.

The root file system is read-only. What a job writes goes to volumes that end with the pod:

    /run/paceline            in memory: the private directory of the job, and the heartbeat
    /tmp                     scratch, HOME, and the run directory (runs/) unless --log-dir is given
    /dev/shm                 in memory: gradients and parameters between processes of the pod
    /run/secrets/paceline    the Secret, a file of mode 0400

and to the claims of --volume, which stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from paceline.launcher.engines.kubernetes.heartbeat import HEARTBEAT_DIRECTORY
from paceline.launcher.engines.kubernetes.pods import JOB, PODS, PORT, SECRET_FILE, pods_text
from paceline.launcher.engines.kubernetes.request import KubernetesRequest

SECRET_KEY = "secret"
POD_MODULE = "paceline.launcher.engines.kubernetes.pod"
PROBE_MODULE = "paceline.launcher.engines.kubernetes.probe"
_SECRET_DIRECTORY = "/run/secrets/paceline"
_USER = 1000
_EXTRA_S = 15  # after --grace: to end processes and report
Object = dict[str, Any]

# $0 is the interpreter, the rest its arguments. Exit code 2 is not repeated.
_START = """\
command -v "$0" >/dev/null ||
  { echo "paceline: the image $IMAGE has no $0; name its interpreter with --python" >&2; exit 2; }
"$0" -c "import paceline" ||
  { echo "paceline: the image $IMAGE has no Paceline for $0; add it: $0 -m pip install paceline" >&2
    exit 2; }
"""
_RUN = _START + 'exec "$0" "$@"\n'
# An Indexed Job has one template for all pods: the first one is the coordinator's.
_RUN_BY_INDEX = (
    _START
    + 'if [ "$JOB_COMPLETION_INDEX" = 0 ]; then exec "$0" "$@"; else exec "$0" -m '
    + POD_MODULE
    + "; fi\n"
)


def launcher_command(request: KubernetesRequest) -> list[str]:
    """Return the command of the coordinator's pod: `paceline run` with the user's options."""
    return ["sh", "-c", _RUN, request.python, *_launch(request)]


def agent_command(request: KubernetesRequest) -> list[str]:
    """Return the command of a pod with workers or servers."""
    return ["sh", "-c", _RUN, request.python, "-m", POD_MODULE]


def indexed_command(request: KubernetesRequest) -> list[str]:
    """Return a command that is the launcher's in the pod of index 0, else the agent's."""
    return ["sh", "-c", _RUN_BY_INDEX, request.python, *_launch(request)]


def _launch(request: KubernetesRequest) -> Sequence[str]:
    # Kubernetes replaces $(NAME) in commands, and $$ by $.
    return ("-m", "paceline", "run", *(word.replace("$", "$$") for word in request.arguments))


def pod_spec(request: KubernetesRequest, role: str, command: Sequence[str]) -> Object:
    """Return the spec of a pod of a role: coordinator, worker (or node), server, or any."""
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,  # nothing in a pod talks to Kubernetes
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(request.grace_s) + _EXTRA_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(request, role, command)],
        "volumes": _volumes(request),
    }


def _container(request: KubernetesRequest, role: str, command: Sequence[str]) -> Object:
    # Python checks the probe's module once in a while; the heartbeat itself costs nothing.
    look = {"exec": {"command": [request.python, "-m", PROBE_MODULE]}, "timeoutSeconds": 10}
    return {
        "name": role,
        "image": request.image,
        "command": list(command),
        "env": _environment(request, role),
        "ports": [{"name": "paceline", "containerPort": PORT}],
        "resources": _resources(request, role),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "startupProbe": {**look, "periodSeconds": 5, "failureThreshold": 60},
        "livenessProbe": {**look, "periodSeconds": 20, "failureThreshold": 3},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "secret", "mountPath": _SECRET_DIRECTORY, "readOnly": True},
            {"name": "run", "mountPath": HEARTBEAT_DIRECTORY},
            {"name": "scratch", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
            *({"name": f"claim-{i}", "mountPath": v.path} for i, v in enumerate(request.volumes)),
        ],
    }


def _environment(request: KubernetesRequest, role: str) -> list[Object]:
    values = {
        "IMAGE": request.image,
        "HOME": "/tmp",
        "XDG_RUNTIME_DIR": HEARTBEAT_DIRECTORY,
        JOB: request.name,
        SECRET_FILE: f"{_SECRET_DIRECTORY}/{SECRET_KEY}",
    }
    if role in ("coordinator", "any"):
        values[PODS] = pods_text(request.hosts())
        values["PACELINE_LOG_DIR"] = f"/tmp/runs/{request.name}"
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    given = [{"name": name, "value": value} for name, value in values.items()]
    return [*given, {"name": "POD_IP", "valueFrom": address}]


def _resources(request: KubernetesRequest, role: str) -> Object:
    if role == "coordinator":
        amount = {"cpu": "1", "memory": "1Gi"}
    else:
        amount = {"cpu": request.cpus, "memory": request.memory}
    if request.gpus and role not in ("coordinator", "server"):
        amount["nvidia.com/gpu"] = str(request.gpus)
    # A CPU limit, too: processes count their threads by it.
    return {"requests": amount, "limits": dict(amount)}


def _volumes(request: KubernetesRequest) -> list[Object]:
    return [
        {
            "name": "secret",
            "secret": {
                "secretName": request.secret or request.name,
                "defaultMode": 0o400,
                "items": [{"key": SECRET_KEY, "path": SECRET_KEY}],
            },
        },
        {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}},
        {"name": "scratch", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        *(
            {"name": f"claim-{i}", "persistentVolumeClaim": {"claimName": volume.claim}}
            for i, volume in enumerate(request.volumes)
        ),
    ]
