"""What a script or a person on the command line can choose about data parallel training.

Which options there are depends on the pace; pace/known.py has the table of them. Each may be given
as a keyword argument of `pl.distribute` or in the brackets of the pace's text, which wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from paceline.compress.known import CODEC
from paceline.compress.parse import parse_codec
from paceline.errors import UsageError
from paceline.grammar import NUMBERS, is_allowed, near, number_text
from paceline.pace.known import KNOWN, find
from paceline.pace.parse import PaceSpec
from paceline.pace.precision import wire_dtype


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of all paces; the docstring of `pl.distribute` says what they mean.

    Those of a method (pace/method.py) are in `own`, as text.
    """

    update: str = "auto"
    buffers: str = "broadcast"
    batchnorm: str = "local"
    unused: str = "warn"
    nonfinite: str = "ignore"
    bucket_mb: float = 16.0
    precision: str = "fp32"
    resize_lr: str = "keep"
    compress: str = "auto"
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
    own: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, pace: PaceSpec, given: Mapping[str, object]) -> Options:
        """Check the keyword arguments of a script, and lay the options of the pace's text over."""
        row = find(pace.name)
        assert row is not None, "a pace that was read is known"
        chosen: dict[str, object] = {
            name: values[0] for name, values in row.options.items() if values not in NUMBERS
        }
        for name, value in given.items():
            _check(pace, name, value)
            chosen[name] = value
        chosen.update(pace.options)
        if "wire" in row.options and "wire" not in {*given, *pace.options}:
            chosen["wire"] = wire_dtype(str(chosen["precision"]))
        kinds = {one.name: one.type for one in fields(cls) if one.name != "own"}
        own = {k: _text(v) for k, v in chosen.items() if k not in kinds}
        common = {k: v for k, v in chosen.items() if k in kinds}
        if row.method:  # its own, also where another pace has an option of the same name
            own = {k: _text(v) for k, v in chosen.items()}
        read = {k: float(v) if kinds[k] == "float" else v for k, v in common.items()}  # type: ignore[arg-type]
        return cls(**read, own=own)  # type: ignore[arg-type]


def _text(value: object) -> str:
    return number_text(float(value)) if isinstance(value, int | float) else str(value)


def fits(pace: PaceSpec, name: str, value: object) -> bool:
    """Say whether a pace has an option that can have this value."""
    row = find(pace.name)
    choices = row.options.get(name, ()) if row is not None else ()
    return choices in (*NUMBERS, CODEC) or value in choices


def _check(pace: PaceSpec, name: str, value: object) -> None:
    row = find(pace.name)
    assert row is not None, "a pace that was read is known"
    options = row.options
    if name not in options:
        others = [other for other, row in KNOWN.items() if name in row.options]
        where = f"; it belongs to {', '.join(others)}" if others else ""
        raise UsageError(
            f"pace {pace.name} has no option {name!r}{where}; its options: {', '.join(options)}"
        )
    choices = options[name]
    if choices == CODEC:
        parse_codec(value)
        return
    if choices not in NUMBERS:
        if value not in choices:
            raise UsageError(
                f"{name}={value!r} is unknown{near(str(value), choices)}; choose one of"
                f" {', '.join(choices)}"
            )
        return
    is_number = isinstance(value, int | float) and 0 <= value < float("inf")
    if not is_number or not is_allowed(float(value), choices):  # type: ignore[arg-type]
        raise UsageError(f"{name}={value!r} must be {choices[0]}")
