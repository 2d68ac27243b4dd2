"""The paces that there are: their words, what may follow them, and what runs them.

A row for each; `paceline run --pace`, PACELINE_PACE and `pl.distribute(pace=...)` are checked
against it. A pace from outside the package adds its row with `register`, or names it in an entry
point of the group `paceline.paces`, where it is found when its word is first asked for. No torch:
the command line imports this; what runs a pace is imported by `distribute` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points

from paceline.compress.known import CODEC
from paceline.errors import UsageError
from paceline.grammar import ABOVE_0, COUNT, FROM_0, NUMBERS, SHARE, WHOLE
from paceline.pace.precision import PRECISIONS

ENTRY_POINTS = "paceline.paces"


@dataclass(frozen=True)
class Pace:
    """What may follow the word of a pace, and what it is."""

    # Of each option the allowed values; the first is the default, or the kind of number (above).
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    number: str = ""  # what comes behind the colon, if something may
    kind: tuple[str, ...] = COUNT  # of that number; or the words that may stand there
    default: str = ""  # what it is if it is left out
    needs_servers: bool = False
    is_free_running: bool = False  # workers do not take the same steps together
    on_one_host: bool = False  # its workers share memory
    needs_servers_with: Mapping[str, str] = field(default_factory=dict)  # options that need them
    uses_servers: bool = False  # if the job has some, it goes through them
    no_servers: str = ""  # why it cannot
    # A class of pace/method.py, or where it is: "module:Class"; "": in data_parallel itself.
    method: str | type = ""
    stands_for: str = ""  # the pace whose other name this is
    notice: str = ""  # what is said once, when it is asked for

    @property
    def has_words(self) -> bool:
        """Whether a word, not a number, stands behind the colon."""
        return bool(self.number) and self.kind not in NUMBERS


_PRECISION = {"precision": PRECISIONS}
_EVERYWHERE = {"bucket_mb": ABOVE_0, **_PRECISION}
_BACKWARD = {
    "buffers": ("broadcast", "average", "local"),
    "batchnorm": ("local", "global"),
    "unused": ("warn", "error", "ignore"),
    **_EVERYWHERE,
}
_RESIZES = {"resize_lr": ("keep", "linear", "sqrt")}
_ON_SERVERS = {
    "nonfinite": ("ignore", "raise", "skip", "quarantine"),
    "server_dtype": ("fp32", "bf16", "fp16"),
    "wire": ("fp32", "bf16", "fp16"),
    "seed": WHOLE,
    "compress": CODEC,
}
_FREE_RUNNING = {
    **_ON_SERVERS,
    "push": ("grad", "delta", "params"),
    "compensate": ("none", "dc"),
    "dc_lambda": ABOVE_0,
    "lr": ("plain", "staleness"),
    "max_staleness": WHOLE,
    "buffers": ("local",),
    **_EVERYWHERE,
}
_LOCALLY = {"buffers": ("average", "broadcast", "local"), **_EVERYWHERE}
_LATE = {"delay": COUNT, "merge": FROM_0, "late": ("replace", "shift")}
_COMPRESSED = {"compress": CODEC}
_OUTER = {**_LOCALLY, **_COMPRESSED, "fragments": WHOLE, **_LATE}
_STEPS = "the number of local steps"
_ELASTIC = {**_LOCALLY, "alpha": FROM_0, "beta": ABOVE_0, "mode": ("sync", "async")}
_FREE = {"mode": "async"}

KNOWN: dict[str, Pace] = {
    "allreduce": Pace(
        {
            "update": ("auto", "replicated", "sharded"),
            **_BACKWARD,
            **_RESIZES,
            "nonfinite": ("ignore", "raise", "skip"),
            **_COMPRESSED,
        }
    ),
    "ps": Pace(
        {**_BACKWARD, **_RESIZES, **_ON_SERVERS, "wait": ("step", "layer")}, needs_servers=True
    ),
    "backup": Pace(
        {**_ON_SERVERS, "buffers": ("local",), "unused": ("ignore",), **_EVERYWHERE},
        number="the number of backup workers",
        default="1",
        needs_servers=True,
    ),
    "async": Pace({**_FREE_RUNNING, "softsync": WHOLE}, needs_servers=True, is_free_running=True),
    "ssp": Pace(
        {**_FREE_RUNNING, "unit": ("clock", "version")},
        number="the staleness",
        default="3",
        needs_servers=True,
        is_free_running=True,
    ),
    "local": Pace(
        _OUTER,
        number=_STEPS,
        kind=WHOLE,
        default="8",
        method="paceline.pace.outer:LocalSteps",
        uses_servers=True,
    ),
    "post_local": Pace(
        {**_OUTER, "after": COUNT},
        number=_STEPS,
        kind=WHOLE,
        default="8",
        method="paceline.pace.outer:PostLocalSteps",
        uses_servers=True,
    ),
    "bmuf": Pace(
        {
            **_OUTER,
            "momentum": FROM_0,
            "outer_lr": ABOVE_0,
            "nesterov": ("yes", "no"),
            "after": COUNT,
            "compat": ("paper", "fairseq"),
        },
        number="the number of steps in a block",
        kind=WHOLE,
        default="10",
        method="paceline.pace.outer:BlockMomentum",
        uses_servers=True,
    ),
    "diloco": Pace(
        {**_OUTER, "momentum": FROM_0, "outer_lr": ABOVE_0, "nesterov": ("yes", "no")},
        number="the number of inner steps",
        kind=WHOLE,
        default="500",
        method="paceline.pace.outer:DiLoCo",
        uses_servers=True,
    ),
    "easgd": Pace(
        _ELASTIC,
        number=_STEPS,
        kind=WHOLE,
        default="10",
        method="paceline.pace.easgd:ElasticAveraging",
        uses_servers=True,
        needs_servers_with=_FREE,
    ),
    "eamsgd": Pace(
        {**_ELASTIC, "momentum": ABOVE_0},
        number=_STEPS,
        kind=WHOLE,
        default="10",
        method="paceline.pace.easgd:ElasticAveragingWithMomentum",
        uses_servers=True,
        needs_servers_with=_FREE,
    ),
    "partial": Pace(
        {
            **_BACKWARD,
            "select": ("random", "round_robin"),
            "skip_compute": ("no", "yes"),
            "carry": ("no", "yes"),
            "seed": COUNT,
        },
        number="the fraction of workers",
        kind=SHARE,
        default="0.5",
        method="paceline.pace.partial:Partial",
        no_servers="its workers average gradients among themselves (backup:1 leaves out the slowest"
        " through servers)",
    ),
    "elastic_sgd": Pace(
        stands_for="partial",
        notice="elastic_sgd is partial participation (a random part of the workers in each step);"
        " for the elastic force to a centre use easgd",
    ),
    "bitmap": Pace(
        {**_BACKWARD, "momentum": FROM_0, "feedback": ("no", "yes"), "seed": COUNT},
        method="paceline.pace.bitmap:Bitmap",
        uses_servers=True,
    ),
    "bmuf_bitmap": Pace(
        stands_for="bitmap",
        notice="bmuf_bitmap is bitmap, a majority vote on the signs of gradients; for blockwise"
        " model-update filtering use bmuf",
    ),
    "gossip": Pace(
        {"buffers": ("local", "average", "broadcast"), **_EVERYWHERE, "seed": COUNT},
        number="who speaks with whom",
        kind=("ring", "exponential", "random"),
        default="ring",
        method="paceline.pace.gossip:Gossip",
        no_servers="its workers speak with their neighbours only, so there is no centre",
    ),
    "hogwild": Pace(
        {**_LOCALLY, "agree": WHOLE}, on_one_host=True, method="paceline.pace.hogwild:Hogwild"
    ),
}


def find(name: str) -> Pace | None:
    """Return the row of a pace, perhaps of one from another package; None: there is none."""
    if name not in KNOWN:
        for point in entry_points(group=ENTRY_POINTS, name=name):
            register(name, point.load())
    row = KNOWN.get(name)
    return KNOWN[row.stands_for] if row is not None and row.stands_for else row


def register(name: str, pace: Pace) -> None:
    """Add a pace, before the first `distribute` that uses it.

    >>> register("mine", Pace(number="the size", default="4", method="my_package.mine:Mine"))
    """
    if not name.isidentifier():
        raise UsageError(f"the name of a pace is one word of letters, not {name[:40]!r}")
    if not isinstance(pace, Pace) or not pace.method:
        raise UsageError(f"pace {name}: expected a Pace with a method, 'module:Class'")
    pace = replace(pace, options={**pace.options, **_PRECISION})
    if name in KNOWN and KNOWN[name] != pace:
        raise UsageError(f"there is a pace {name} already; choose another word")
    KNOWN[name] = pace


def needs_servers(name: str) -> bool:
    """Say whether a pace exists only with parameter servers, which run the optimizer."""
    row = find(name)
    return row is not None and row.needs_servers


def paces_with_servers() -> list[str]:
    """Return the paces that need parameter servers, for messages."""
    return sorted(name for name, pace in KNOWN.items() if pace.needs_servers)
