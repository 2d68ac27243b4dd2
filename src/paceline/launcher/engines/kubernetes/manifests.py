"""The objects of a job: a Secret, and a JobSet, an Indexed Job with its Service, or a TrainJob.

In all of them the coordinator's pod decides: if it succeeds, the job has succeeded and Kubernetes
ends the other pods. A pod that is lost is replaced by itself, never with all others:

    evicted, preempted, its node drained     replaced; does not count
    exit code 75: workers have saved         replaced; does not count. The job resumes
    killed (SIGKILL, out of memory)          replaced, up to --retries times for each pod
    exit code 2: the pod can never run       the job fails
    coordinator: any other exit code         the script failed: the job fails
"""

from __future__ import annotations

import json
import signal
from typing import Any

from paceline import __version__
from paceline.control.transport.auth import new_secret
from paceline.errors import ConfigError
from paceline.launcher.engines.kubernetes.pod_template import (
    SECRET_KEY,
    Object,
    agent_command,
    indexed_command,
    launcher_command,
    pod_spec,
)
from paceline.launcher.engines.kubernetes.request import KubernetesRequest
from paceline.runtime.preemption import PREEMPTED

_UNUSABLE = 2  # exit code of a pod whose image, secret or settings do not fit
_KILLED = [128 + signal.SIGKILL, 128 + signal.SIGTERM]
_INSTANCE = "app.kubernetes.io/instance"
# Kubeflow's label of the replicated job whose values the `trainer` of a TrainJob sets.
_TRAINER_STEP = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def manifests(request: KubernetesRequest, secret: str = "") -> list[Object]:
    """Return all objects of a job; `secret` is for tests: 64 hexadecimal digits."""
    made = {"jobset": _jobset, "job": _indexed_job, "trainjob": _trainjob}[request.flavour](request)
    if request.secret is None:
        made.insert(0, _secret(request, secret or new_secret().hex()))
    return made


def selector(request: KubernetesRequest) -> str:
    """Return kubectl's words for all objects of a job."""
    return f"-l {_INSTANCE}={request.name}"


def as_json(objects: list[Object]) -> str:
    """Return objects as one List, which kubectl reads."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2) + "\n"


def as_yaml(objects: list[Object]) -> str:
    """Return objects as YAML documents; raises ConfigError without PyYAML."""
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            "YAML needs PyYAML: pip install 'paceline[kubernetes]', or print JSON with -o json"
        ) from None

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        def ignore_aliases(self, data: Any) -> bool:
            del data
            return True

    def text(dumper: Any, value: str) -> Any:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return str(yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, explicit_start=True))


def _metadata(request: KubernetesRequest, role: str = "") -> Object:
    labels = {
        "app.kubernetes.io/name": "paceline",
        _INSTANCE: request.name,
        "app.kubernetes.io/version": __version__,
        "app.kubernetes.io/managed-by": "paceline",
    }
    labels |= {"app.kubernetes.io/component": role} if role else {}
    return {"labels": labels}


def _object(request: KubernetesRequest, api: str, kind: str, **content: Any) -> Object:
    metadata = {"name": request.name, **_metadata(request)}
    if request.namespace is not None:
        metadata["namespace"] = request.namespace
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **content}


def _secret(request: KubernetesRequest, digits: str) -> Object:
    data = {SECRET_KEY: digits}
    return _object(request, "v1", "Secret", type="Opaque", immutable=True, stringData=data)


# -- JobSet ---------------------------------------------------------------------------------------


def _jobset(request: KubernetesRequest) -> list[Object]:
    spec = _jobset_spec(request)
    return [_object(request, "jobset.x-k8s.io/v1alpha2", "JobSet", spec=spec)]


def _jobset_spec(request: KubernetesRequest) -> Object:
    roles = [("coordinator", 1, launcher_command(request))]
    roles.append((request.worker_role, request.num_worker_pods, agent_command(request)))
    if request.num_server_pods:
        roles.append(("server", request.num_server_pods, agent_command(request)))
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["coordinator"]},
        # A restart would recreate every pod. Each role has its own limits instead.
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [_replicated_job(request, *role) for role in roles],
    }


def _replicated_job(
    request: KubernetesRequest, role: str, count: int, command: list[str]
) -> Object:
    pod = {"metadata": _metadata(request, role), "spec": pod_spec(request, role, command)}
    template: Object = {"spec": {**_job_policy(request, role), **_indexed(count), "template": pod}}
    if request.flavour == "trainjob" and role == request.worker_role:
        template = {"metadata": {"labels": dict(_TRAINER_STEP)}, **template}
    return {"name": role, "replicas": 1, "template": template}


def _indexed(count: int) -> Object:
    return {"completionMode": "Indexed", "completions": count, "parallelism": count}


def _job_policy(request: KubernetesRequest, container: str) -> Object:
    if container in ("coordinator", "any"):
        final = {"operator": "NotIn", "values": sorted([PREEMPTED, *_KILLED])}
    else:
        final = {"operator": "In", "values": [_UNUSABLE]}
    final = {"containerName": container, **final}
    saved = {"containerName": container, "operator": "In", "values": [PREEMPTED]}
    return {
        "backoffLimitPerIndex": request.retries,
        "maxFailedIndexes": 0,  # a pod that fails for good fails the job
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                {"action": "Ignore", "onExitCodes": saved},
                {"action": "FailJob", "onExitCodes": final},
            ]
        },
    }


# -- Indexed Job ----------------------------------------------------------------------------------


def _indexed_job(request: KubernetesRequest) -> list[Object]:
    """Return one Job for all roles: only the success of its index 0 can end the other pods."""
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {_INSTANCE: request.name},
    }
    count = 1 + request.num_worker_pods + request.num_server_pods
    pod = pod_spec(request, "any", indexed_command(request))
    spec = {
        **_job_policy(request, "any"),
        **_indexed(count),
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "template": {
            "metadata": _metadata(request),
            "spec": {"subdomain": request.name, **pod},
        },
    }
    return [
        _object(request, "v1", "Service", spec=service),
        _object(request, "batch/v1", "Job", spec=spec),
    ]


# -- Kubeflow Trainer -----------------------------------------------------------------------------


def _trainjob(request: KubernetesRequest) -> list[Object]:
    """Return a TrainJob and a runtime of its own: no other runtime has these roles."""
    api = "trainer.kubeflow.org/v1alpha1"
    runtime = {
        "mlPolicy": {"numNodes": request.num_worker_pods},
        "template": {"spec": _jobset_spec(request)},
    }
    job = {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "TrainingRuntime",
            "name": request.name,
        },
        "trainer": {"image": request.image, "numNodes": request.num_worker_pods},
    }
    return [
        _object(request, api, "TrainingRuntime", spec=runtime),
        _object(request, api, "TrainJob", spec=job),
    ]
