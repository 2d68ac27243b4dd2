"""Quantities as text: rates (25gbit), times (50us, 6h), links (25gbit,50us), stragglers (3x2%)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from paceline.errors import ConfigError

_NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_TIMES = {
    **{"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0},
    **{"min": 60.0, "h": 3600.0, "d": 86400.0, "y": 365 * 86400.0},
}
_SIZES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def _scaled(text: str, units: Mapping[str, float], option: str, example: str) -> float:
    found = re.fullmatch(_NUMBER + r"\s*([a-z]+)", text.strip().lower(), re.ASCII)
    if found is None or found[2] not in units:
        raise ConfigError(
            f"{option} {text[:40]!r}: expected a number and a unit"
            f" ({', '.join(units)}), such as {example}"
        )
    value = float(found[1]) * units[found[2]]
    if not math.isfinite(value):
        raise ConfigError(f"{option} {text[:40]!r} is not finite; write for example {example}")
    return value


def parse_rate(text: str, option: str = "rate") -> float:
    """Return bytes per second: "25gbit" is 3.125e9. A rate of zero is refused."""
    rate = _scaled(text, _RATES, option, "25gbit") / 8
    if rate <= 0:
        raise ConfigError(f"{option} {text!r}: nothing can be sent at that rate; give more than 0")
    return rate


def parse_time(text: str, option: str = "time") -> float:
    """Return seconds: "50us", "1.5s", "6h"."""
    return _scaled(text, _TIMES, option, "50us or 6h")


def parse_size(text: str, option: str = "size") -> int:
    """Return bytes: "16gb", "512MiB"."""
    return int(_scaled(text, _SIZES, option, "16gb"))


class Link(NamedTuple):
    """One direction between two hosts; both directions have it, at the same time."""

    bytes_per_s: float
    latency_s: float

    @property
    def text(self) -> str:
        """As on the command line: "25gbit,50us"."""
        return f"{rate_text(self.bytes_per_s)},{_latency_text(self.latency_s)}"


def rate_text(bytes_per_s: float) -> str:
    """Return a rate as `parse_rate` reads it: "25gbit"."""
    bits = bytes_per_s * 8
    for unit in ("tbit", "gbit", "mbit"):
        if bits >= _RATES[unit]:
            return f"{bits / _RATES[unit]:.3g}{unit}"
    return f"{bits / 1e3:.3g}kbit"


def _latency_text(latency_s: float) -> str:
    return f"{latency_s * 1e6:.3g}us" if latency_s < 1e-3 else f"{latency_s * 1e3:.3g}ms"


DEFAULT_LATENCY_S = 50e-6


def parse_link(text: str, option: str = "--link") -> Link:
    """Parse "25gbit,50us"; without a latency it is 50 microseconds."""
    rate, comma, latency = text.partition(",")
    return Link(
        parse_rate(rate, option), parse_time(latency, option) if comma else DEFAULT_LATENCY_S
    )


class Straggler(NamedTuple):
    """Steps that take `factor` times as long: each with a probability, or all of some workers."""

    factor: float = 1.0
    probability: float = 0.0  # of each step of each worker
    workers: int = 0  # so many workers are slow in every step

    @property
    def text(self) -> str:
        """As on the command line: "3x2%", "4x1"."""
        which = f"{self.probability * 100:g}%" if self.probability else f"{self.workers}"
        return f"{self.factor:g}x{which}"


NO_STRAGGLER = Straggler()


def parse_straggler(text: str, option: str = "--straggler") -> Straggler:
    """Parse "3x2%" (any step, with a probability of 2 %) or "3x1" (one worker, always)."""
    found = re.fullmatch(_NUMBER + "x" + _NUMBER + "(%?)", text.strip().lower(), re.ASCII)
    hint = (
        "write FACTORxSHARE% for any step with that probability (3x2%),"
        " or FACTORxCOUNT for so many workers that are always slow (3x1)"
    )
    if found is None:
        raise ConfigError(f"{option} {text[:40]!r}: {hint}")
    factor, amount = float(found[1]), float(found[2])
    if factor < 1:
        raise ConfigError(
            f"{option} {text!r}: a straggler is slower, so the factor is >= 1; {hint}"
        )
    if found[3]:
        if amount > 100:
            raise ConfigError(f"{option} {text!r}: {amount:g} % is more than all steps; {hint}")
        return Straggler(factor, probability=amount / 100)
    if amount != int(amount):
        raise ConfigError(f"{option} {text!r}: {amount:g} workers are not a whole number; {hint}")
    return Straggler(factor, workers=int(amount))
