"""What a user asks of Kubernetes for one job, checked before anything is sent."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.launcher.engines.kubernetes.pods import pods_as_hosts
from paceline.launcher.hosts.host_list import HostSlots

FLAVOURS = ("jobset", "job", "trainjob")
# Kubernetes allows 63 characters in the names of pods, which add the role, two numbers and five
# random characters: "<name>-coordinator-0-0-x7k2p".
MAX_NAME = 40
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_OBJECT = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,1023}")
_CPUS = re.compile(r"[0-9]+(\.[0-9]+)?|[0-9]+m")
_BYTES = re.compile(r"[0-9]+(\.[0-9]+)?([EPTGMk]|[EPTGMK]i)?")
_PATH = re.compile(r"/[^\0:,]*")
_OWN_PATHS = ("/dev/shm", "/tmp", "/run/paceline", "/run/secrets/paceline")


@dataclass(frozen=True)
class Volume:
    """A PersistentVolumeClaim, and where all pods of the job see it."""

    claim: str
    path: str

    @classmethod
    def parse(cls, text: str) -> Volume:
        """Read CLAIM:PATH; raises ConfigError."""
        claim, _, path = text.partition(":")
        if not _OBJECT.fullmatch(claim) or not _PATH.fullmatch(path) or path == "/":
            raise ConfigError(
                f"--volume {text[:80]!r}: expected the name of a PersistentVolumeClaim and an"
                " absolute path, for example --volume data:/data"
            )
        if any(path == own or path.startswith(f"{own}/") for own in _OWN_PATHS):
            raise ConfigError(
                f"--volume {text[:80]}: the pods have a volume of their own at {path}; choose"
                " another path"
            )
        return cls(claim, path)


@dataclass(frozen=True, kw_only=True)
class KubernetesRequest:
    """One job. `arguments` are those of `paceline run` inside of the coordinator's pod."""

    name: str
    image: str
    num_workers: int
    num_worker_pods: int
    num_server_pods: int = 0
    flavour: str = "jobset"
    namespace: str | None = None
    cpus: str = "1"  # of each pod with workers or servers
    memory: str = "4Gi"  # of the same, /dev/shm included
    gpus: int = 0  # of each pod with workers
    volumes: tuple[Volume, ...] = ()
    secret: str | None = None  # the name of an existing Secret; None: one is made
    retries: int = 3  # of each pod that fails by itself
    python: str = "python"  # in the image
    grace_s: float = 45.0
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_names()
        if self.flavour not in FLAVOURS:
            raise ConfigError(
                f"--flavour {self.flavour[:40]!r}: expected auto, {', '.join(FLAVOURS[:-1])} or"
                f" {FLAVOURS[-1]}"
            )
        if not 1 <= self.num_worker_pods <= self.num_workers:
            raise ConfigError(
                f"-N {self.num_worker_pods} with {self.num_workers} workers: expected from 1 pod to"
                " one for each worker; change -N or -n"
            )
        for option, value, pattern, example in (
            ("--cpus", self.cpus, _CPUS, "4 or 500m"),
            ("--memory", self.memory, _BYTES, "8Gi"),
        ):
            if not pattern.fullmatch(value):
                raise ConfigError(
                    f"{option} {value[:40]!r}: expected a quantity, such as {example}"
                )
        if not 0 <= self.gpus <= 64:
            raise ConfigError(f"--gpus {self.gpus}: expected a number from 0 to 64")
        if not 0 <= self.retries <= 1000:
            raise ConfigError(f"--retries {self.retries}: expected a number from 0 to 1000")
        paths = [volume.path for volume in self.volumes]
        if len(set(paths)) < len(paths):
            raise ConfigError("--volume: two volumes have the same path; give each its own")

    def _check_names(self) -> None:
        if not _LABEL.fullmatch(self.name) or len(self.name) > MAX_NAME:
            raise ConfigError(
                f"--name {self.name[:80]!r}: Kubernetes does not allow it for pods; expected at"
                f" most {MAX_NAME} lower-case letters, digits and '-', a letter first and no '-' at"
                f" the end, for example --name {allowed_name(self.name)}"
            )
        if self.namespace is not None and not _NAMESPACE.fullmatch(self.namespace):
            raise ConfigError(
                f"--namespace {self.namespace[:80]!r}: expected lower-case letters, digits and '-',"
                " for example --namespace team-a"
            )
        if self.secret is not None and not _OBJECT.fullmatch(self.secret):
            raise ConfigError(f"--secret {self.secret[:80]!r}: expected the name of a Secret")
        if not _IMAGE.fullmatch(self.image):
            raise ConfigError(
                f"--image {self.image[:80]!r}: expected an image with Paceline and the script, for"
                " example --image registry.example.org/team/train:1"
            )
        if not self.python or not self.python.isprintable():
            raise ConfigError(f"--python {self.python[:60]!r}: expected a path in the image")

    @property
    def slots(self) -> int:
        """How many workers run in each pod."""
        return -(-self.num_workers // self.num_worker_pods)

    @property
    def worker_role(self) -> str:
        """The part of a pod's name; Kubeflow prescribes its own."""
        return "node" if self.flavour == "trainjob" else "worker"

    def worker_pods(self) -> list[str]:
        """Return the DNS names of the pods with workers, in the order of ranks."""
        if self.flavour == "job":
            return [f"{self.name}-{1 + i}.{self.name}" for i in range(self.num_worker_pods)]
        return self._pods(self.worker_role, self.num_worker_pods)

    def server_pods(self) -> list[str]:
        """Return the DNS names of the pods with servers."""
        if self.flavour == "job":
            first = 1 + self.num_worker_pods
            return [f"{self.name}-{first + i}.{self.name}" for i in range(self.num_server_pods)]
        return self._pods("server", self.num_server_pods)

    def _pods(self, role: str, count: int) -> list[str]:
        return [f"{self.name}-{role}-0-{i}.{self.name}" for i in range(count)]

    def hosts(self) -> tuple[HostSlots, ...]:
        """Return all pods that run processes; a pod for servers has no slot."""
        workers = dict.fromkeys(self.worker_pods(), self.slots)
        return pods_as_hosts({**workers, **dict.fromkeys(self.server_pods(), 0)})


def allowed_name(text: str) -> str:
    """Return the name that Kubernetes allows and that is nearest to a text."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    name = name if name[:1].isalpha() else f"job-{name}".strip("-")
    return name[:MAX_NAME].rstrip("-")


def new_name(script: str) -> str:
    """Return a name for a job of this script that no other job has."""
    return f"{allowed_name(script)[: MAX_NAME - 5].rstrip('-')}-{secrets.token_hex(2)}"
