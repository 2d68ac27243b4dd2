"""The events that processes of a job report, and those that are kept in events.jsonl.

A worker hands an event to its control agent. The agent sends it to the coordinator, which forwards
it to every process that watches the job (in `paceline run`: the launcher's display). Events are
values: frozen, self-contained, without a reply. They may be dropped while the control plane is
down, so the correctness of a job never depends on them.

    Event            reported by workers and servers
    MembershipEvent  reported by the coordinator, to processes that watch the job
    Recorded         what events.jsonl holds

The field `type` distinguishes the kinds on the wire and in the file: a new kind is a new class here
and one more name in a union. A server sends a complete `TableReport` each time; the newest one of a
table replaces the earlier ones. `Spans` (trace.py) go to the launcher only.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from paceline.observe.telemetry.staleness import TableReport
from paceline.observe.telemetry.step_times import StepTimes
from paceline.observe.telemetry.trace import Spans
from paceline.observe.telemetry.traffic import Compression, Traffic
from paceline.observe.telemetry.wait_reports import WaitReport

EVENTS_FORMAT = 1
# Shares of a step's time in percent, measured without the script's help.
COMPUTE_SHARE = "compute %"
COMM_SHARE = "comm %"
# Values that workers report automatically, unless the script reports the same name.
LEARNING_RATE = "lr"  # of the first param group
STALENESS = "stale"  # versions of other workers that the last update had not seen (free-running)
DONE_SHARE = "done %"  # of the script's outermost loop over pl.steps or pl.epochs
DEVICE_TIME = "device ms"  # of the device, from one step to the next
DEVICE_MEMORY = "device MB"  # the most that this process has used
COPY_SHARE = "copy %"  # of the device's time: copies between host and device
BACKWARD_LOSS = "backward loss"  # the value on which the script calls backward() (PACELINE_PROBE)
CODEC_ERROR = "codec error"  # share of a gradient that a codec leaves for later steps, 0 to 1


class ProgressReport(msgspec.Struct, frozen=True, tag_field="type", tag="progress"):
    """`rank` has finished training step `step`; `values` holds new values by display name.

    `age_s` is how long ago the step was finished. Reports are sent at intervals, and the last one
    of a script may wait until its evaluation is over. Speeds are measured from step to step, not by
    arrival.
    """

    rank: int
    step: int
    values: dict[str, float] = {}
    age_s: float = 0.0
    traffic: Traffic | None = None  # total so far
    compression: Compression | None = None  # total so far
    steps: tuple[StepTimes, ...] = ()  # since the last report, as the training hooks count


class Note(msgspec.Struct, frozen=True, tag_field="type", tag="note"):
    """A sentence for the user, for example "waiting for rank 3 since 2 s"."""

    rank: int
    text: str


class ServerLoad(msgspec.Struct, frozen=True, tag_field="type", tag="load"):
    """Recent load of a server, for the partitions of which it is the primary."""

    rank: int
    server: int  # its number
    requests_s: float  # per second
    bytes_s: float  # per second, of the tensors in those requests
    busy: float  # share of the time spent on requests
    queued: int = 0  # longest queue seen


class Resumed(msgspec.Struct, frozen=True, tag_field="type", tag="resumed"):
    """The workers continue after a membership change: all of them, or one (free-running)."""

    rank: int  # the reporting worker
    step: int  # the current one
    num_workers: int
    lost: tuple[int, ...]  # ranks
    took_s: float
    repeats: bool  # the exchange of that step was repeated


class Preemptible(msgspec.Struct, frozen=True, tag_field="type", tag="preemptible"):
    """This worker saves a checkpoint when it is asked to stop, and needs time for it."""

    rank: int


class EpochEnded(msgspec.Struct, frozen=True, tag_field="type", tag="epoch"):
    """A pass over a training loader has ended, with counts of the samples it handed out.

    The first worker reports for all workers. In elastic free-running jobs each worker (`worker`:
    its number) reports its own share.
    """

    rank: int
    loader: str  # "loader 0": in the order in which the script called pl.shard
    epoch: int
    samples: int  # that counted, each once unless `repeated`
    reissued: int = 0  # handed out again, because their worker was lost before they counted
    padded: int = 0  # entries of a global batch that repeat a sample with weight 0
    dropped: int = 0  # left out by drop_last, if known
    repeated: int = 0  # upper bound of samples counted twice: the checkpoint was older
    is_drawn: bool = False  # by a sampler, which may give a sample several times or never
    worker: int | None = None


class TrainingConfigured(msgspec.Struct, frozen=True, tag_field="type", tag="settled"):
    """What a model is trained with, once the script has set it up: pace, mesh, optimizer ..."""

    rank: int  # the worker that reports for all
    values: dict[str, str]


class MemberLost(msgspec.Struct, frozen=True, tag_field="type", tag="lost"):
    """A process is no longer in the job; `generation` is the first without it."""

    role: str
    number: int
    rank: int
    where: str  # host:pid
    why: str
    generation: int


class MemberJoined(msgspec.Struct, frozen=True, tag_field="type", tag="joined"):
    """A process has joined a running job."""

    role: str
    number: int
    rank: int
    where: str
    generation: int


class MemberLeft(msgspec.Struct, frozen=True, tag_field="type", tag="left"):
    """A process has exited cleanly, or was released."""

    role: str
    number: int
    rank: int
    where: str
    generation: int


class Promoted(msgspec.Struct, frozen=True, tag_field="type", tag="promoted"):
    """A backup has become the primary of partitions, because their primary was lost."""

    server: int  # its number
    partitions: tuple[int, ...]
    generation: int


class PartitionsMoved(msgspec.Struct, frozen=True, tag_field="type", tag="moved"):
    """Partitions have another primary although the old one is alive: load balancing."""

    source: int  # numbers of servers
    target: int
    partitions: tuple[int, ...]
    generation: int


class BackupCaughtUp(msgspec.Struct, frozen=True, tag_field="type", tag="filled"):
    """A server has complete copies of partitions, and is now their backup."""

    server: int
    partitions: tuple[int, ...]
    generation: int


class CoordinatorRestarted(msgspec.Struct, frozen=True, tag_field="type", tag="coordinator"):
    """The coordinator was restarted and has replayed its journal."""

    generation: int
    entries: int  # of the journal


MembershipEvent: TypeAlias = (
    MemberLost
    | MemberJoined
    | MemberLeft
    | Promoted
    | PartitionsMoved
    | BackupCaughtUp
    | CoordinatorRestarted
)


class RunStarted(msgspec.Struct, frozen=True, tag_field="type", tag="run"):
    """What was started; the first line of events.jsonl."""

    run: str  # the name of its directory
    started: str  # ISO 8601, UTC
    command: str
    script: str
    workers: int
    servers: int = 0
    data_workers: int = 0
    pace: str = ""  # "": the script chooses
    mesh: str = ""
    host: str = ""
    version: str = ""  # of paceline
    clock_s: float = 0.0  # the job's clock (observe/telemetry/clock.py) at t = 0
    format: int = EVENTS_FORMAT


class RunEnded(msgspec.Struct, frozen=True, tag_field="type", tag="end"):
    """How the run ended; the last line of events.jsonl."""

    exit_code: int
    wall_s: float
    words: str = ""  # the closing line


_Reported: TypeAlias = (
    ProgressReport | Note | TableReport | ServerLoad | Resumed | Preemptible | EpochEnded
    | TrainingConfigured
)  # fmt: skip
Event: TypeAlias = _Reported | Spans | WaitReport
Recorded: TypeAlias = _Reported | MembershipEvent | RunStarted | RunEnded
