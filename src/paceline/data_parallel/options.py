"""What a script or a person on the command line can choose about data parallel training.

Which options there are depends on the pace; pace/parse.py has the table of them. Each may be given
as a keyword argument of `pl.distribute` or in the brackets of the pace's text, which wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from paceline.errors import UsageError
from paceline.pace.parse import ABOVE_0, KNOWN, PaceSpec


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of all paces; the docstring of `pl.distribute` says what they mean."""

    update: str = "auto"
    buffers: str = "broadcast"
    batchnorm: str = "local"
    unused: str = "warn"
    nonfinite: str = "ignore"
    bucket_mb: float = 16.0
    wait: str = "step"
    server_dtype: str = "fp32"
    wire: str = "fp32"
    seed: float = 0
    push: str = "grad"
    compensate: str = "none"
    dc_lambda: float = 0.04
    lr: str = "plain"
    softsync: float = 0
    max_staleness: float = 0  # 0: no limit
    unit: str = "clock"

    @classmethod
    def of(cls, pace: PaceSpec, given: Mapping[str, object]) -> Options:
        """Check the keyword arguments of a script, and lay the options of the pace's text over."""
        known = KNOWN[pace.name].options
        chosen: dict[str, object] = {
            name: values[0] for name, values in known.items() if values is not ABOVE_0
        }
        for name, value in given.items():
            _check(pace, name, value)
            chosen[name] = value
        chosen.update(pace.options)
        numbers = [field.name for field in fields(cls) if field.type == "float"]
        return cls(**{k: float(v) if k in numbers else v for k, v in chosen.items()})  # type: ignore[arg-type]


def _check(pace: PaceSpec, name: str, value: object) -> None:
    options = KNOWN[pace.name].options
    if name not in options:
        others = [other for other, row in KNOWN.items() if name in row.options]
        where = f"; it belongs to {', '.join(others)}" if others else ""
        raise UsageError(
            f"distribute: pace {pace.name} has no option {name!r}{where}; its options:"
            f" {', '.join(options)}"
        )
    choices = options[name]
    if choices is not ABOVE_0:
        if value not in choices:
            raise UsageError(
                f"distribute: {name}={value!r} is unknown; choose one of {', '.join(choices)}"
            )
    elif not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UsageError(f"distribute: {name}={value!r} must be a number above 0")
