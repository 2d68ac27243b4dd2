"""What a script or a person on the command line can choose about data parallel training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.errors import UsageError
from paceline.pace.parse import KNOWN

_CHOICES = {name: values for name, values in KNOWN["allreduce"].options.items() if values}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keyword arguments of `pl.distribute`; its docstring says what they mean."""

    update: str = "auto"
    buffers: str = "broadcast"
    batchnorm: str = "local"
    unused: str = "warn"
    nonfinite: str = "ignore"
    bucket_mb: float = 16.0

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise UsageError(
                    f"distribute: {name}={getattr(self, name)!r} is unknown; choose one of"
                    f" {', '.join(choices)}"
                )
        is_number = isinstance(self.bucket_mb, int | float)
        if not is_number or not 0 < self.bucket_mb < float("inf"):
            raise UsageError(f"distribute: bucket_mb={self.bucket_mb!r} must be a number above 0")

    def overridden(self, options: Mapping[str, str]) -> Options:
        """Return these options with some replaced by text, as it comes from a pace's brackets."""
        numbers = {"bucket_mb": float}
        return replace(self, **{k: numbers.get(k, str)(v) for k, v in options.items()})  # type: ignore[arg-type]
