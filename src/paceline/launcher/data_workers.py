"""How many data workers a job gets: `--data-workers 2`, or `2,1` for two stages in a row."""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.errors import ConfigError

MAX_DATA_WORKERS = 1024
_NUMBERS = re.compile(r"[0-9]{1,9}(,[0-9]{1,9})*")


def parse_data_workers(text: str) -> tuple[int, ...]:
    """Read what was given as --data-workers; "0" means none."""
    words = text.replace(" ", "")
    if not _NUMBERS.fullmatch(words):
        raise ConfigError(
            f"--data-workers {text[:40]}: expected a number, or one for each stage; for example"
            " --data-workers 2, or --data-workers 2,1"
        )
    counts = tuple(map(int, words.split(",")))
    return () if counts == (0,) else counts


def check_data_workers(counts: Sequence[int]) -> None:
    """Refuse stages without anybody, and more than a machine can have."""
    if any(count < 1 for count in counts) or sum(counts) > MAX_DATA_WORKERS:
        given = ",".join(map(str, counts))
        raise ConfigError(
            f"--data-workers {given}: expected at least 1 for each stage, and at most"
            f" {MAX_DATA_WORKERS} in all; for example --data-workers 2"
        )
