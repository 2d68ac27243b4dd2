"""A budget of bandwidth (`--max-wire 200mbit`): how much each host may send to other hosts.

`plan` and `run` keep what fits. For a given pace, `lighter` lists variants that send less and less:
precision first, then codecs, then more local steps. The first that fits changes the training least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.compress.registry import parse_codec
from paceline.errors import UsageError
from paceline.pace.parse import PaceSpec
from paceline.planner.candidates import BLOCKED
from paceline.planner.codecs import cost_of
from paceline.planner.predict import Prediction

STRONG_CODECS = ("int4", "topk:0.01+int8")
_LADDER = ("bf16", "int8", *STRONG_CODECS)
_MORE_STEPS = (2, 4, 8)
_TWO_HOSTS = 2


def wire_bytes_per_s(prediction: Prediction) -> float:
    """Return what one host sends to other hosts, on average."""
    return prediction.sent_bytes / prediction.step_s


def within_budget(
    predictions: Sequence[Prediction], max_wire: float | None, hint: str = ""
) -> Sequence[Prediction]:
    """Return those that send at most `max_wire` bytes per second; UsageError if there are none."""
    if max_wire is None:
        return predictions
    allowed = [one for one in predictions if wire_bytes_per_s(one) <= max_wire]
    if not allowed:
        least = min(predictions, key=wire_bytes_per_s)
        raise UsageError(
            f"--max-wire {max_wire * 8 / 1e6:.4g}mbit: no pace sends so little;"
            f" {least.candidate.label} comes closest with {mbit_text(wire_bytes_per_s(least))} per"
            f" host{hint}"
        )
    return allowed


def mbit_text(bytes_per_s: float) -> str:
    """Return a rate for people: "143 Mbit/s"."""
    return f"{bytes_per_s * 8 / 1e6:.4g} Mbit/s"


def lighter(pace: PaceSpec) -> Iterator[PaceSpec]:
    """Yield a pace and variants of it that send less, the mildest first."""
    yield pace
    own = parse_codec(pace.options.get("compress", "none"))
    sent = cost_of(own, _TWO_HOSTS).ring_share(_TWO_HOSTS)
    is_blocked = pace.name in BLOCKED
    # What a strong codec and local steps do together to the loss is not known.
    ladder = _LADDER[:2] if is_blocked else _LADDER
    last = pace
    for word in ladder:
        if cost_of(parse_codec(word), _TWO_HOSTS).ring_share(_TWO_HOSTS) < sent:
            last = PaceSpec(pace.name, pace.number, {**pace.options, "compress": word})
            yield last
    if is_blocked:
        for factor in _MORE_STEPS:
            yield PaceSpec(pace.name, pace.value * factor, last.options)
