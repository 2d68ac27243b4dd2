"""What a job asks of Ray: the cluster, the resources of each process, and how long to wait."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.errors import ConfigError
from paceline.launcher.hosts.host_list import HostSlots

SCHEME = "ray"
DEFAULT_WAIT_S = 60.0
_MAX_WAIT_S = 30 * 24 * 3600.0
STRATEGIES = ("pack", "spread")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}):([0-9]{1,5})")
_RESOURCE = re.compile(r"[A-Za-z_][A-Za-z0-9_.:-]{0,99}")


@dataclass(frozen=True)
class RayRequest:
    """Part of a RunSpec. `address` is "" for RAY_ADDRESS, or the cluster of this machine."""

    address: str = ""
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})  # of each process
    strategy: str = STRATEGIES[0]  # of workers; servers are always spread
    wait_s: float = DEFAULT_WAIT_S  # for Ray to find room for the processes of the start

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ConfigError(
                f"--placement {self.strategy[:40]!r}: expected pack (few nodes) or spread (many)"
            )
        if not 0 < self.wait_s <= _MAX_WAIT_S:
            raise ConfigError(
                f"--wait {self.wait_s:g}: expected seconds above 0, for example --wait 300"
            )
        for name, amount in self.resources.items():
            _check_resource(name, amount)
        if not any(self.resources.values()):
            raise ConfigError("--resources: name at least one resource, such as CPU=1")

    @classmethod
    def parse(
        cls,
        on: str,
        resources: str | None = None,
        strategy: str | None = None,
        wait_s: float | None = None,
    ) -> RayRequest:
        """Read the options of the command line; raises ConfigError."""
        return cls(
            parse_address(on),
            {"CPU": 1.0} if resources is None else parse_resources(resources),
            STRATEGIES[0] if strategy is None else strategy,
            DEFAULT_WAIT_S if wait_s is None else wait_s,
        )

    @staticmethod
    def placeholders(num_workers: int) -> tuple[HostSlots, ...]:
        """Return hosts that stand for the nodes, which Ray chooses later."""
        return (HostSlots(PLACEHOLDER, max(1, num_workers)),)


PLACEHOLDER = "nodes-of-ray"


def is_for_ray(on: str | None) -> bool:
    """Return whether --on names Ray."""
    return on is not None and (on == SCHEME or on.startswith(f"{SCHEME}:"))


def parse_address(on: str) -> str:
    """Return the address in the value of --on, "" if there is none; raises ConfigError."""
    if on == SCHEME:
        return ""
    address = on.removeprefix(f"{SCHEME}://")
    match = _ADDRESS.fullmatch(address)
    if address == on or match is None or not 1 <= int(match[2]) <= 65535:
        raise ConfigError(
            f"--on {on[:80]!r}: expected ray, or ray://HOST:PORT with the address of the cluster's"
            " head as in `ray start --address`, for example --on ray://10.0.0.1:6379"
        )
    return address


def parse_resources(text: str) -> dict[str, float]:
    """Read the value of --resources, such as "CPU=2,memory=1e9"; raises ConfigError."""
    found: dict[str, float] = {}
    for word in text.split(","):
        name, equals, amount = word.strip().partition("=")
        try:
            number = float(amount)
        except ValueError:
            equals = ""
            number = 0.0
        if not equals or name in found:
            raise ConfigError(
                f"--resources {text[:80]!r}: expected NAME=AMOUNT with commas between, each name"
                " once, for example --resources CPU=2"
            )
        found[name] = number
    return found


def _check_resource(name: str, amount: object) -> None:
    if not isinstance(name, str) or not _RESOURCE.fullmatch(name):
        raise ConfigError(f"resource {name!r:.60}: expected a name such as CPU, memory or disk")
    if name == "GPU":
        raise ConfigError(
            "resource GPU: Paceline does not divide the GPUs of a Ray node among workers; ask for"
            " CPU or for a resource of your own"
        )
    if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 <= amount < 1e18:
        raise ConfigError(f"resource {name}={amount!r:.40}: expected a number of at least 0")
