"""`--devices`: which devices the workers of a host get. comm/devices.py chooses them.

auto        worker i of a host has device i; the CPU if the machine has no accelerator
cpu         the CPU
cuda        as auto, but a machine without such a device is refused
cuda:0,1    worker i of a host has the i-th of these; two workers share a device only if it is
            named twice
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigError


@dataclass(frozen=True)
class DeviceRequest:
    """A type of device, and the device of each worker of a host."""

    kind: str = "auto"  # "auto", "cpu", or a type of torch.device
    indices: tuple[int, ...] = ()  # empty: device i for worker i

    def __str__(self) -> str:
        return f"{self.kind}:{','.join(map(str, self.indices))}" if self.indices else self.kind


def parse_devices(text: str, source: str = "--devices") -> DeviceRequest:
    """Parse `auto`, `cpu`, `cuda` or `cuda:0,1`. ConfigError for anything else."""
    kind, colon, rest = text.strip().partition(":")
    numbers = [number.removeprefix(f"{kind}:").strip() for number in rest.split(",")]
    is_valid = kind.isidentifier() and (not colon or all(n.isdecimal() for n in numbers))
    if not is_valid or (colon and kind in ("auto", "cpu")):
        raise ConfigError(
            f"{source} {text!r}: expected auto, cpu, a type of device such as cuda, or some of"
            " them, as in cuda:0,1"
        )
    return DeviceRequest(kind, tuple(map(int, numbers)) if colon else ())
