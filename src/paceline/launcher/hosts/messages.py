"""Messages between the launcher and the agent of a host, and the invitation that starts an agent.

The invitation travels over the agent's standard input and contains the job's secret. Everything
after it travels over one authenticated control channel, which the agent opens to the launcher.
"""

from __future__ import annotations

import msgspec

from paceline.errors import BadFrame
from paceline.runtime.process_names import ProcessName

LAUNCHER = "launcher"  # the launcher's name in the handshake
ROLE = "agent"
AGENT_PREFIX = "paceline agent: "  # of lines on standard error, before the connection
MAX_INVITATION_BYTES = 16 << 20  # the environment and the arguments of a job are in it


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent reads first, on one line of JSON."""

    version: str  # of Paceline
    job_id: str
    secret: str  # hexadecimal
    host_index: int
    host_name: str  # as the user wrote it
    addresses: tuple[str, ...]  # where the launcher may be reached, host:port
    spec: msgspec.Raw  # a RunSpec, as in job.json; the working directory is the agent's
    environ: dict[str, str]  # for the template: variables of a worker without rank

    def encode(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Invitation:
        try:
            return msgspec.json.decode(line, type=cls)
        except (ValueError, RecursionError) as error:  # ValueError: msgspec's and Unicode's
            raise BadFrame(f"the invitation of the launcher cannot be read: {error}") from None


# -- from the agent -------------------------------------------------------------------------------


class HostFacts(msgspec.Struct, frozen=True, kw_only=True, tag="facts"):
    """What an agent found on its host; `problems` keep the job from running there."""

    hostname: str
    host_id: str
    version: str
    python: str
    pid: int
    cores: int
    memory_bytes: int  # available
    shm_bytes: int  # free in /dev/shm
    clock_s: float  # time of day
    launcher: tuple[str, ...]  # addresses of the launcher that it reached
    addresses: tuple[str, ...]  # where it listens for the probes of other hosts, host:port
    problems: tuple[str, ...] = ()


class ProbeResult(msgspec.Struct, frozen=True):
    """Whether a host reached another host at one address; `error` is empty if it did."""

    host_index: int
    address: str
    error: str = ""


class Probed(msgspec.Struct, frozen=True, tag="probed"):
    results: tuple[ProbeResult, ...]


class Started(msgspec.Struct, frozen=True, tag="started"):
    rank: int
    pid: int


class NotStarted(msgspec.Struct, frozen=True, tag="not started"):
    rank: int
    error: str


class Output(msgspec.Struct, frozen=True, tag="output"):
    """Bytes that a process printed; none at the end of the stream."""

    rank: int
    is_error: bool
    data: bytes


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """How a process ended; `reason` is why the kernel of its host killed it, if it shows that."""

    rank: int
    code: int | None
    signal: int | None
    diagnosis: str
    reason: str


class ProcessReport(msgspec.Struct, frozen=True):
    """The state of a running process."""

    rank: int
    stopped_s: float | None  # how long it has been stopped; None while it runs
    is_exiting: bool
    shows_stacks: bool
    state: str  # in words
    busy_s: float | None  # processor time of a server


class Poll(msgspec.Struct, frozen=True, tag="poll"):
    """Sent several times per second: the agent is alive."""

    processes: tuple[ProcessReport, ...]


class Said(msgspec.Struct, frozen=True, tag="said"):
    """A line for the launcher's display."""

    text: str


class AskedToStop(msgspec.Struct, frozen=True, tag="stop"):
    """`paceline stop` was typed on this host."""


class HostLeaves(msgspec.Struct, frozen=True, tag="leaves"):
    """This host is about to go away: a signal, or what --preemption-notice names."""

    why: str
    within_s: float | None = None
    is_withdrawn: bool = False  # it stays after all
    is_for_job: bool = False  # a signal that a scheduler sends to all hosts of a job that it ends


class AllEnded(msgspec.Struct, frozen=True, tag="all ended"):
    """The answer to EndAll: the pids that could not be ended."""

    pids: tuple[int, ...]


FromAgent = (
    HostFacts
    | Probed
    | Started
    | NotStarted
    | Output
    | Exited
    | Poll
    | Said
    | AskedToStop
    | HostLeaves
    | AllEnded
)


# -- to the agent ---------------------------------------------------------------------------------


class ProbeTarget(msgspec.Struct, frozen=True):
    host_index: int
    addresses: tuple[str, ...]


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Connect to other hosts at each of their addresses, and report which answer."""

    targets: tuple[ProbeTarget, ...]


class Publish(msgspec.Struct, frozen=True, tag="publish"):
    """Write the facts of the job (job.json), with which commands find it on this host."""

    facts: bytes  # JSON


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Start a process with these variables over the environment of the host."""

    rank: int
    number: int
    is_server: bool
    is_newcomer: bool
    is_data_worker: bool
    environ: dict[str, str]

    @classmethod
    def of(cls, name: ProcessName, environ: dict[str, str]) -> Start:
        return cls(
            name.rank,
            name.number,
            name.is_server,
            name.is_newcomer,
            name.is_data_worker,
            environ,
        )

    @property
    def name(self) -> ProcessName:
        return ProcessName(
            self.rank, self.number, self.is_server, self.is_newcomer, self.is_data_worker
        )


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """Send a signal to a process and everything in its process group."""

    rank: int
    signal: int


class AskForStacks(msgspec.Struct, frozen=True, tag="stacks"):
    rank: int


class Remove(msgspec.Struct, frozen=True, tag="remove"):
    """Release a process that has ended while the job continues; end what it started."""

    rank: int


class ExpectNoMore(msgspec.Struct, frozen=True, tag="no more"):
    """No further process will be started on this host."""


class EndAll(msgspec.Struct, frozen=True, tag="end"):
    """End every process of the job on this host, then the agent."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Sent several times per second: the launcher is alive."""


ToAgent = Probe | Publish | Start | Kill | AskForStacks | Remove | ExpectNoMore | EndAll | Ping
