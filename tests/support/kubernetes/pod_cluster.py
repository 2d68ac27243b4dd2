"""Pods without Kubernetes: a test host for each pod of some manifests, where its container runs.

with PodCluster(objects, directory) as pods:
    pods.start_all()
    pods.pod("train-worker-0-1").host.kill()    # the pod dies
    pods.replace("train-worker-0-1")            # Kubernetes starts its replacement
    pods.pod("train-coordinator-0-0").wait()    # its exit code

A pod has the names, environment, mounted Secret, volumes and user that its manifest gives it. The
names are in hosts files instead of DNS. Not done: seccomp, resource limits, scheduling.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from support.cluster.host import Host, _child
from support.cluster.host_group import HostGroup

_CONTAINER = Path(__file__).with_name("container.py")
_ROOT = Path(__file__).parents[3]
_NEW = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


class PodPlan:
    """One pod of the manifests."""

    def __init__(self, name: str, subdomain: str, index: int, spec: dict[str, Any]) -> None:
        self.name, self.subdomain, self.index, self.spec = name, subdomain, index, spec


def plans(objects: list[dict[str, Any]]) -> list[PodPlan]:
    """Return all pods that controllers of Kubernetes would make of these objects."""
    found = []
    for one in objects:
        name, spec = one["metadata"]["name"], one.get("spec", {})
        if one["kind"] == "Job":
            pod = spec["template"]["spec"]
            found += [
                PodPlan(f"{name}-{i}", pod["subdomain"], i, pod) for i in range(spec["completions"])
            ]
        if one["kind"] == "TrainingRuntime":
            spec = spec["template"]["spec"]
        for job in spec.get("replicatedJobs", []):
            body = job["template"]["spec"]
            found += [
                PodPlan(f"{name}-{job['name']}-0-{i}", name, i, body["template"]["spec"])
                for i in range(body["completions"])
            ]
    return found


class Pod:
    """A pod on its host; `output` has what its container has printed so far."""

    def __init__(self, plan: PodPlan, host: Host, log: Path) -> None:
        self.plan, self.host, self._log = plan, host, log
        self._started: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def start(self, secrets: dict[str, dict[str, str]], directory: Path, claims: Path) -> None:
        """Run the container."""
        (container,) = self.plan.spec["containers"]
        environ = self._environ(container)
        volumes = {volume["name"]: volume for volume in self.plan.spec["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        inside = self.plan.spec["securityContext"]
        secret = next(volume["secret"] for volume in volumes.values() if "secret" in volume)
        wanted = {
            "image": sorted({str(_ROOT), sys.prefix, sys.base_prefix, str(directory)}),
            "scratch": [path for path, volume in mounts.items() if "emptyDir" in volume],
            "claims": {
                path: str(claims / volume["persistentVolumeClaim"]["claimName"])
                for path, volume in mounts.items()
                if "persistentVolumeClaim" in volume
            },
            "secrets": {
                path: secrets[volume["secret"]["secretName"]]
                for path, volume in mounts.items()
                if "secret" in volume
            },
            **{"mode": secret["defaultMode"], "user": inside["runAsUser"]},
            **{"group": inside["fsGroup"], "directory": str(directory), "environ": environ},
            "command": [expand(word, environ) for word in container["command"]],
        }
        self.reap()  # the pod before this one has died
        with self._log.open("ab") as log:
            self._started = self.host.popen(
                [*_NEW, sys.executable, "-I", str(_CONTAINER)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        assert self._started.stdin is not None
        self._started.stdin.write(json.dumps(wanted).encode())
        self._started.stdin.close()

    def _environ(self, container: dict[str, Any]) -> dict[str, str]:
        environ = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",  # the image's
            "HOSTNAME": self.plan.name,
            "JOB_COMPLETION_INDEX": str(self.plan.index),
            "OMP_NUM_THREADS": "1",
        }
        for one in container["env"]:
            source = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            assert source in (None, "status.podIP")
            environ[one["name"]] = self.host.address if source else one["value"]
        return environ

    @property
    def process(self) -> int:
        """The number on this machine of the container's process 1."""
        assert self._started is not None
        return _child(self.host.pid_of(self._started))

    def look(self) -> subprocess.CompletedProcess[str]:
        """Run the liveness probe in the container."""
        (container,) = self.plan.spec["containers"]
        probe = container["livenessProbe"]["exec"]["command"]
        user = str(self.plan.spec["securityContext"]["runAsUser"])
        enter = ["nsenter", "--target", str(self.process), "--mount", "--pid", "--net"]
        become = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--"]
        return subprocess.run(
            [*enter, *become, *probe],
            **{"env": self._environ(container), "capture_output": True, "text": True},
            timeout=30,
        )

    def signal(self, number: int) -> None:
        """Signal the container's process 1, as kubelet does."""
        os.kill(self.process, number)

    def wait(self, within_s: float = 120) -> int:
        """Wait for the container's end; return its exit code, as Kubernetes counts it."""
        assert self._started is not None
        code = self._started.wait(within_s)
        return code if code >= 0 else 128 - code

    def reap(self) -> None:
        """Wait for what started a container that has ended."""
        if self._started is not None:
            self._started.wait(10)

    def wait_for(self, text: str, within_s: float = 60) -> None:
        """Wait until the container has printed a text."""
        deadline_s = time.monotonic() + within_s
        while text not in self.output:
            assert self._started is not None and self._started.poll() is None, self.output
            assert time.monotonic() < deadline_s, f"no {text!r} in: {self.output}"
            time.sleep(0.05)


class PodCluster(HostGroup):
    """The pods of some manifests by name; `directory` is the working directory of the image."""

    def __init__(self, objects: list[dict[str, Any]], directory: Path, claims: Path) -> None:
        self._plans = plans(objects)
        super().__init__(*(plan.name for plan in self._plans))
        self._image, self._claims = directory, claims
        self._secrets = {
            one["metadata"]["name"]: one["stringData"] for one in objects if one["kind"] == "Secret"
        }

    def _prepare(self) -> None:
        hosts = {host.name: host for host in self.hosts}
        lines = [
            f"{hosts[plan.name].address} {plan.name} {plan.name}.{plan.subdomain}"
            for plan in self._plans
        ]
        text = "\n".join(["127.0.0.1 localhost", *lines, ""])
        for name in hosts:
            (self.directory / f"{name}.etc" / "hosts").write_text(text)
        self._pods = {
            plan.name: Pod(plan, hosts[plan.name], self.directory / f"{plan.name}.log")
            for plan in self._plans
        }

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for pod in self.pods:
            pod.reap()

    def pod(self, name: str) -> Pod:
        return self._pods[name]

    @property
    def pods(self) -> list[Pod]:
        return list(self._pods.values())

    def start_all(self) -> None:
        for pod in self.pods:
            self.start(pod)

    def start(self, pod: Pod) -> None:
        pod.start(self._secrets, self._image, self._claims)

    def replace(self, name: str) -> None:
        """Start a pod of the same name in place of one that has died."""
        pod = self._pods[name]
        if not pod.host.is_up:
            self.boot(pod.host)
        self.start(pod)

    def outputs(self) -> str:
        return "\n".join(f"--- {pod.plan.name}\n{pod.output}" for pod in self.pods)


def expand(word: str, environ: dict[str, str]) -> str:
    """Replace $(NAME) and $$ as Kubernetes does in commands; unknown names stay."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return environ.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)", value, word)
