"""The table of paces: their words, numbers and options, and what runs them.

One row for each; `paceline run --pace`, PACELINE_PACE and `pl.distribute(pace=...)` are checked
against it. A pace of another package adds its row with `register`, or names it in an entry point of
the group `paceline.paces`, where it is found when its word is first used. No torch: the command
line imports this; only `distribute` imports what runs a pace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points

from paceline.errors import UsageError
from paceline.options.grammar import ABOVE_0, COUNT, FROM_0, SHARE, WHOLE, Number, Option
from paceline.options.table import PRECISION, options_at

ENTRY_POINTS = "paceline.paces"


@dataclass(frozen=True)
class Pace:
    """What a pace is, and what may follow its word."""

    options: tuple[Option, ...] = ()
    number: str = ""  # the meaning of the number after the colon, if one is allowed
    kind: Number | tuple[str, ...] = COUNT  # of that number; or the allowed words
    default: str = ""  # its default
    needs_servers: bool = False
    is_free_running: bool = False  # workers do not take the same steps together
    on_one_host: bool = False  # its workers share memory
    needs_servers_with: Mapping[str, str] = field(default_factory=dict)  # options that need them
    uses_servers: bool = False  # if the job has some
    no_servers: str = ""  # why it cannot use them
    # A class of pace/method.py, or its location, "module:Class"; "": data_parallel itself.
    method: str | type = ""
    stands_for: str = ""  # the pace of which this is another name
    notice: str = ""  # shown once, when it is used

    @property
    def has_words(self) -> bool:
        """Whether a word, not a number, follows the colon."""
        return bool(self.number) and isinstance(self.kind, tuple)

    def option(self, name: str) -> Option | None:
        """Return an option, or None."""
        return next((option for option in self.options if option.name == name), None)


# Options of methods only; those that training and servers read are in options/table.py.
_OUTER = (
    Option(
        "fragments",
        WHOLE,
        "average the model in so many parts, one after the other: H must be a multiple of it",
        1,
    ),
    Option(
        "delay",
        COUNT,
        "apply a mean so many steps after it was sent; it is in transit while they compute",
        0,
    ),
    Option("merge", FROM_0, "how much of its own value a worker then keeps, 0 to 1", 0),
    Option(
        "late",
        ("replace", "shift"),
        "`shift`: keep all steps that were taken during the delay: the worker moves by the change"
        " of the others",
    ),
)
_KEPT = "what is kept of the last change"
_OUTER_LR = "the outer learning rate"
_NESTEROV = Option("nesterov", ("yes", "no"), "look ahead (for `bmuf`: NBM; with `no` CBM)")
_AFTER = "so many steps are first taken together, gradients averaged"
_ELASTIC = (
    Option(
        "alpha",
        FROM_0,
        "how far a worker moves towards the centre; 0: the workers are independent",
        otherwise="`beta` / number of workers, at least 2",
    ),
    Option("beta", ABOVE_0, "how far the centre moves towards the mean of all workers", 0.9),
    Option(
        "mode",
        ("sync", "async"),
        "`async`: each worker by itself, without waiting (it needs servers)",
    ),
)
_COINS = Option("seed", COUNT, "random seed for breaking ties", 0)
_DRAWN = Option("seed", COUNT, "of random choices, the same on all workers", 0)
_STEPS = "the number of local steps"
_FREE = {"mode": "async"}

_ROWS = {
    "allreduce": Pace(),
    "ps": Pace(needs_servers=True),
    "backup": Pace(number="the number of backup workers", default="1", needs_servers=True),
    "async": Pace(needs_servers=True, is_free_running=True),
    "ssp": Pace(number="the staleness", default="3", needs_servers=True, is_free_running=True),
    "local": Pace(
        _OUTER,
        number=_STEPS,
        kind=WHOLE,
        default="8",
        method="paceline.pace.outer:LocalSteps",
        uses_servers=True,
    ),
    "post_local": Pace(
        (*_OUTER, Option("after", COUNT, _AFTER, 1000)),
        number=_STEPS,
        kind=WHOLE,
        default="8",
        method="paceline.pace.outer:PostLocalSteps",
        uses_servers=True,
    ),
    "bmuf": Pace(
        (
            Option("outer_lr", ABOVE_0, _OUTER_LR, 1),
            Option("momentum", FROM_0, _KEPT, otherwise="1 - 1 / number of workers"),
            _NESTEROV,
            Option("after", COUNT, _AFTER, 500),
            Option(
                "compat",
                ("paper", "fairseq"),
                "`fairseq`: as in fairseq: G counts (1 - momentum) times, and the look-ahead stays"
                " in the values at which the next block begins",
            ),
            *_OUTER,
        ),
        number="the number of steps in a block",
        kind=WHOLE,
        default="10",
        method="paceline.pace.outer:BlockMomentum",
        uses_servers=True,
    ),
    "diloco": Pace(
        (
            Option("outer_lr", ABOVE_0, _OUTER_LR, 0.7),
            Option("momentum", FROM_0, _KEPT, 0.9),
            _NESTEROV,
            *_OUTER,
        ),
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
        (
            *_ELASTIC,
            Option("momentum", ABOVE_0, "Nesterov momentum for SGD that has none", 0.9),
        ),
        number=_STEPS,
        kind=WHOLE,
        default="10",
        method="paceline.pace.easgd:ElasticAveragingWithMomentum",
        uses_servers=True,
        needs_servers_with=_FREE,
    ),
    "partial": Pace(
        (
            Option("select", ("random", "round_robin"), "`round_robin`: the workers take turns"),
            Option(
                "skip_compute",
                ("no", "yes"),
                "`yes`: a worker that does not take part computes no gradients",
            ),
            Option(
                "carry",
                ("no", "yes"),
                "`yes`: what a worker computed and no step counted is added to what it sends next",
            ),
            _DRAWN,
        ),
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
        (
            Option(
                "momentum",
                FROM_0,
                "vote with the signs of m <- momentum * m + (1 - momentum) * g (Signum); 0: with"
                " those of the gradients (signSGD)",
                0.9,
            ),
            Option(
                "feedback",
                ("no", "yes"),
                "`yes`: vote with the signs of v = m + e, and carry over what the vote has left"
                " out: e <- v - s * sign(v), where s is the mean of \\|v\\| in the bucket;"
                " gradients are then plus and minus the mean of all workers' s, and learning rates"
                " the usual ones",
            ),
            _COINS,
        ),
        method="paceline.pace.bitmap.pace:Bitmap",
        uses_servers=True,
    ),
    "bmuf_bitmap": Pace(
        stands_for="bitmap",
        notice="bmuf_bitmap is bitmap, a majority vote on the signs of gradients; for blockwise"
        " model-update filtering use bmuf",
    ),
    "gossip": Pace(
        (_DRAWN,),
        number="the topology",
        kind=("ring", "exponential", "random"),
        default="ring",
        method="paceline.pace.gossip:Gossip",
        no_servers="its workers exchange with their neighbours only, so there is no centre",
    ),
    "hogwild": Pace(
        (
            Option(
                "agree",
                WHOLE,
                "so many steps from one agreement (buffers, stopping) to the next",
                16,
            ),
        ),
        on_one_host=True,
        method="paceline.pace.hogwild:Hogwild",
    ),
}

AUTO = "auto"  # not a pace, but a word for the one that the planner chooses
_ROWS[AUTO] = Pace(
    (
        Option(
            "allow",
            ("codecs", "exact", "stale", "local", "stale+local"),
            "what [the planner](planning.md#automatic-choice) may choose: `exact`: what equals one"
            " process with the global batch; `codecs`: also gradients rounded to bf16 or int8;"
            " `stale`: also `ssp` and `async`; `local`: also `local` and `diloco`",
        ),
    ),
    uses_servers=True,
)

KNOWN = {
    name: replace(row, options=(*row.options, *options_at(name))) for name, row in _ROWS.items()
}


def find(name: str) -> Pace | None:
    """Return the row of a pace, also of another package, or None."""
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
    pace = replace(pace, options=(*pace.options, PRECISION))
    if name in KNOWN and KNOWN[name] != pace:
        raise UsageError(f"a pace {name} exists already; choose another word")
    KNOWN[name] = pace


def needs_servers(name: str) -> bool:
    """Return whether a pace exists only with parameter servers, which run the optimizer."""
    row = find(name)
    return row is not None and row.needs_servers


def paces_with_servers() -> list[str]:
    """Return the paces that need parameter servers, for messages."""
    return sorted(name for name, pace in KNOWN.items() if pace.needs_servers)
