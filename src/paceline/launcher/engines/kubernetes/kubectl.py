"""Creates objects with `kubectl`, the user's own: contexts, credentials and plugins apply.

Objects go over standard input, so the Secret is in no argument and in no file. They are created,
not applied: `kubectl apply` would keep a copy of the Secret in an annotation. If one of them is
refused, those that were created before it are deleted.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from paceline.errors import LaunchError
from paceline.launcher.engines.kubernetes.manifests import as_json, selector
from paceline.launcher.engines.kubernetes.pod_template import Object
from paceline.launcher.engines.kubernetes.request import KubernetesRequest

_PATIENCE_S = 60
_ASK_S = "10s"
# In order: the first that is found. {what} is the namespace in words.
_MEANINGS: tuple[tuple[str, str], ...] = (
    (
        r"no matches for kind \"JobSet\"",
        "JobSet is not installed in this cluster; use --flavour job",
    ),
    (
        r"no matches for kind \"(TrainJob|TrainingRuntime)\"",
        "Kubeflow Trainer is not installed in this cluster; use --flavour jobset or job",
    ),
    (r"AlreadyExists|already exists", "an object of that name is there; choose another --name"),
    (
        r"namespaces \S+ not found",
        "{what} does not exist; create it, or choose another --namespace",
    ),
    (
        r"exceeded quota",
        "the quota of {what} is used up; ask for less with -n, --cpus or --memory, or wait",
    ),
    (
        r"violates PodSecurity|denied the request",
        "{what} does not admit these pods",
    ),
    (
        r"\(Forbidden\)|is forbidden",
        "you have no right to do this in {what}; ask for the rights to create secrets, services and"
        " jobs, or choose another --namespace",
    ),
    (
        r"You must be logged in|Unauthorized|provide credentials",
        "Kubernetes does not know you; log in to the cluster, then try `kubectl get pods`",
    ),
    (
        r"connection to the server|Unable to connect|no such host|i/o timeout|ServerTimeout",
        "no cluster answers; check the context (`kubectl config current-context`) and the network",
    ),
    (
        r"context \S+ does not exist|invalid configuration|no configuration has been provided",
        "kubectl has no cluster; choose one with `kubectl config use-context`, or set KUBECONFIG",
    ),
)


def installed_flavour() -> str:
    """Return "jobset" if the cluster has JobSet, else "job"; raises LaunchError."""
    words = ("api-resources", "--api-group=jobset.x-k8s.io", "--output=name")
    return "jobset" if "jobsets" in _kubectl(words, "") else "job"


def create(request: KubernetesRequest, objects: Sequence[Object]) -> str:
    """Create all objects, or none; return what to print. Raises LaunchError."""
    where = () if request.namespace is None else (f"--namespace={request.namespace}",)
    made: list[str] = []
    for one in objects:
        words = ("create", "--filename=-", "--output=name", *where)
        try:
            made += _kubectl(words, as_json([one]), request.namespace).split()
        except LaunchError:
            if made:
                _kubectl(("delete", "--ignore-not-found", *where, *made), "", request.namespace)
            raise
    there = f" -n {request.namespace}" if request.namespace else ""
    pods = f"{selector(request)},app.kubernetes.io/component=coordinator"
    if request.flavour == "job":
        pods = f"{selector(request)},batch.kubernetes.io/job-completion-index=0"
    return (
        f"created {', '.join(made)}\n"
        f"output:  kubectl logs{there} -f {pods}\n"
        f"pods:    kubectl get pods{there} {selector(request)}\n"
        f"end it:  kubectl delete{there} {' '.join(reversed(made))}"
    )


def _kubectl(words: Sequence[str], text: str, namespace: str | None = None) -> str:
    command = ["kubectl", f"--request-timeout={_ASK_S}", *words]
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, check=False, timeout=_PATIENCE_S
        )
    except FileNotFoundError:
        raise LaunchError(
            "cannot start kubectl: it is not in PATH; install it, or print the manifests with"
            " --dry-run and create them elsewhere"
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"kubectl failed: {error}; try `kubectl get pods`") from error
    if done.returncode != 0:
        raise LaunchError(explain_kubectl(done.stderr, namespace))
    return done.stdout


def explain_kubectl(errors: str, namespace: str | None = None) -> str:
    """Return one sentence for kubectl's errors, with the line that decided."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    what = f"namespace {namespace}" if namespace else "your namespace"
    for pattern, meaning in _MEANINGS:
        found = [line for line in lines if re.search(pattern, line)]
        if found:
            return f"{meaning.format(what=what)} (kubectl: {_plain(found[-1])})"
    last = _plain(lines[-1]) if lines else "no reason given"
    return f"Kubernetes does not accept the job: {last}"


def _plain(line: str) -> str:
    return re.sub(r"^(error|Error from server( \([A-Za-z]+\))?): ", "", line)
