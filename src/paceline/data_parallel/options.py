"""What a script or a person on the command line can choose about data parallel training.

Which options there are depends on the pace; pace/parse.py has the table of them. Each may be given
as a keyword argument of `pl.distribute` or in the brackets of the pace's text, which wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from paceline.errors import UsageError
from paceline.pace.parse import ABOVE_0, KNOWN, WHOLE, PaceSpec

_NUMBERS = (ABOVE_0, WHOLE)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of all paces; the docstring of `pl.distribute` says what they mean."""

    update: str = "auto"
    buffers: str = "broadcast"
    batchnorm: str = "local"
    unused: str = "warn"
    nonfinite: str = "ignore"
    bucket_mb: float = 16.0
    resize_lr: str = "keep"
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
            name: values[0] for name, values in known.items() if values not in _NUMBERS
        }
        for name, value in given.items():
            _check(pace, name, value)
            chosen[name] = value
        chosen.update(pace.options)
        numbers = [field.name for field in fields(cls) if field.type == "float"]
        return cls(**{k: float(v) if k in numbers else v for k, v in chosen.items()})  # type: ignore[arg-type]


def fits(pace: PaceSpec, name: str, value: object) -> bool:
    """Say whether a pace has an option that can have this value."""
    choices = KNOWN[pace.name].options.get(name, ())
    return choices in _NUMBERS or value in choices


def _check(pace: PaceSpec, name: str, value: object) -> None:
    options = KNOWN[pace.name].options
    if name not in options:
        others = [other for other, row in KNOWN.items() if name in row.options]
        where = f"; it belongs to {', '.join(others)}" if others else ""
        raise UsageError(
            f"pace {pace.name} has no option {name!r}{where}; its options: {', '.join(options)}"
        )
    choices = options[name]
    if choices not in _NUMBERS:
        if value not in choices:
            raise UsageError(f"{name}={value!r} is unknown; choose one of {', '.join(choices)}")
        return
    is_good = isinstance(value, int | float) and 0 < value < float("inf")
    if choices is WHOLE and is_good:
        is_good = float(value).is_integer()  # type: ignore[arg-type]
    if not is_good:
        raise UsageError(f"{name}={value!r} must be {choices[0]}")
