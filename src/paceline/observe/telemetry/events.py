"""The events that a process of the job reports about itself.

A worker hands an event to its control agent, the agent sends it to the coordinator, and the
coordinator gives it to whoever watches the job (in `paceline run`: the launcher's display). Events
are values: frozen, self-contained, without a reply. They may be dropped when the control plane is
gone, so nothing that a job needs in order to be right travels this way.

`Event` is the union of all kinds; on the wire the field `type` tells them apart, so a new kind is a
new class here and one more name in the union. `TableReport` comes from servers, whole each time:
the newest one of a table replaces the earlier ones. `Spans` (trace.py) go to the launcher only.

A `Happening` is what the coordinator itself has to tell about the job's members; only those who
watch the job hear of it.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from paceline.observe.telemetry.staleness import TableReport
from paceline.observe.telemetry.step_times import StepTimes
from paceline.observe.telemetry.trace import Spans
from paceline.observe.telemetry.traffic import Compression, Traffic
from paceline.observe.telemetry.waiting import Waiting

# Shares of a step's time, in percent of it, measured without the script's help.
COMPUTE_SHARE = "compute %"
COMM_SHARE = "comm %"
# Values that workers report by themselves, unless the script reports the same name.
LEARNING_RATE = "lr"  # of the first param group
STALENESS = "stale"  # versions by others that the last update had not seen, at free-running paces
DONE_SHARE = "done %"  # of the script's outermost loop over pl.steps or pl.epochs
CODEC_ERROR = "codec error"  # how much of a gradient a codec leaves for later, 0 to 1


class Progress(msgspec.Struct, frozen=True, tag_field="type", tag="progress"):
    """`rank` has finished training step `step`; `values` are news, by the name to show.

    `age_s` is how long ago the step was finished: reports wait for their turn, and the last one of
    a script may wait for its evaluation. Speeds are measured from step to step, not by arrival.
    """

    rank: int
    step: int
    values: dict[str, float] = {}
    age_s: float = 0.0
    traffic: Traffic | None = None  # all of it so far
    compression: Compression | None = None  # as well
    steps: tuple[StepTimes, ...] = ()  # those since the last report, as the training hooks count


class Note(msgspec.Struct, frozen=True, tag_field="type", tag="note"):
    """A sentence for the person who watches, for example "waiting for rank 3 since 2 s"."""

    rank: int
    text: str


class ServerLoad(msgspec.Struct, frozen=True, tag_field="type", tag="load"):
    """What a server had to do lately, for the partitions that it answers for."""

    rank: int
    server: int  # its number
    requests_s: float  # per second, as the next
    bytes_s: float  # of tensors that came with them
    busy: float  # share of the time that went into requests
    queued: int = 0  # most requests that were found waiting at one time


class Resumed(msgspec.Struct, frozen=True, tag_field="type", tag="resumed"):
    """The workers go on after a change of the membership, all of them or (free-running) one."""

    rank: int  # who tells
    step: int  # the one under way
    num_workers: int
    lost: tuple[int, ...]  # ranks
    took_s: float
    repeats: bool  # the exchange of that step was done again


class Preemptible(msgspec.Struct, frozen=True, tag_field="type", tag="preemptible"):
    """This worker saves when it is asked to stop, and needs time for that."""

    rank: int


class EpochEnded(msgspec.Struct, frozen=True, tag_field="type", tag="epoch"):
    """A pass over a loader for training came to its end; what was handed out in it.

    Of all workers, told by the first of them; in elastic jobs at paces that run free, each worker
    (`worker`: its number) tells about its own part.
    """

    rank: int
    loader: str  # "loader 0": by the order in which the script gave them to pl.shard
    epoch: int
    samples: int  # that counted, each once unless `repeated`
    reissued: int = 0  # handed out a second time, because who had them was lost before they counted
    padded: int = 0  # parts of a global batch that repeat a sample with weight 0
    dropped: int = 0  # left out by drop_last, where that is known
    repeated: int = 0  # at most so many counted twice: a checkpoint was behind some workers
    is_drawn: bool = False  # by a sampler, which may give a sample often or not at all
    worker: int | None = None


class Settled(msgspec.Struct, frozen=True, tag_field="type", tag="settled"):
    """What a model is trained with, when the script has set it up: pace, mesh, optimizer ..."""

    rank: int  # who tells, for all
    values: dict[str, str]


Event: TypeAlias = (
    Progress
    | Note
    | TableReport
    | ServerLoad
    | Resumed
    | Preemptible
    | EpochEnded
    | Settled
    | Spans
    | Waiting
)


class MemberLost(msgspec.Struct, frozen=True, tag_field="type", tag="lost"):
    """Somebody is not in the job any more; `generation` is the first without it."""

    role: str
    number: int
    rank: int
    where: str  # host:pid
    why: str
    generation: int


class MemberJoined(msgspec.Struct, frozen=True, tag_field="type", tag="joined"):
    """Somebody came into a job that was under way."""

    role: str
    number: int
    rank: int
    where: str
    generation: int


class MemberLeft(msgspec.Struct, frozen=True, tag_field="type", tag="left"):
    """Somebody ended in good order, or was let go."""

    role: str
    number: int
    rank: int
    where: str
    generation: int


class Promoted(msgspec.Struct, frozen=True, tag_field="type", tag="promoted"):
    """A backup is the primary of partitions from now on, because theirs was lost."""

    server: int  # its number
    partitions: tuple[int, ...]
    generation: int


class Moved(msgspec.Struct, frozen=True, tag_field="type", tag="moved"):
    """Partitions have another primary while the old one is still there: relief."""

    source: int  # numbers of servers
    target: int
    partitions: tuple[int, ...]
    generation: int


class Filled(msgspec.Struct, frozen=True, tag_field="type", tag="filled"):
    """A server has complete copies of partitions, and counts as their backup from now on."""

    server: int
    partitions: tuple[int, ...]
    generation: int


class CoordinatorBack(msgspec.Struct, frozen=True, tag_field="type", tag="coordinator"):
    """The coordinator was restarted and goes on from its journal."""

    generation: int
    entries: int  # of the journal


Happening: TypeAlias = (
    MemberLost | MemberJoined | MemberLeft | Promoted | Moved | Filled | CoordinatorBack
)
