"""What `paceline compare` and `paceline parity` ask of the workers of the jobs that they start.

It travels in one variable, PACELINE_PROBE, as JSON. data_parallel/probe/ does what it asks;
pl.shard and the start of a process read one field each. Without the variable nothing is watched.
"""

from __future__ import annotations

import msgspec

from paceline.errors import ConfigError


class ProbeSpec(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What to watch, and what to change, in a worker."""

    losses: bool = False  # report the mean of the values on which backward() is called
    slow: dict[int, float] = {}  # by rank: how many times as long its computation takes
    seed: int | None = None  # of the generators at the start of each process, plus its rank
    record: str = ""  # directory for the tensors of the first steps
    steps: int = 0  # so many of them
    stands_for: int = 0  # this one process trains on the global batch of so many workers

    def text(self) -> str:
        """Return the value of the variable."""
        return msgspec.json.encode(self).decode()


NO_PROBE = ProbeSpec()


def parse_probe(text: str | None) -> ProbeSpec:
    """Return what the variable asks; nothing if it is not set."""
    if text is None:
        return NO_PROBE
    try:
        return msgspec.json.decode(text, type=ProbeSpec)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"PACELINE_PROBE={text[:60]!r} cannot be read ({error}); unset it: `paceline compare`"
            " and `paceline parity` set it for their jobs"
        ) from None
