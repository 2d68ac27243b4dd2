"""Messages between the Ray engine and its driver: one JSON text in a line, each way."""

from __future__ import annotations

import msgspec


class Acquire(msgspec.Struct, frozen=True, kw_only=True, tag="acquire"):
    """The first message: connect, and find room for so many processes."""

    job_id: str
    address: str
    workers: int
    more_workers: int  # asked for in addition, without waiting for them
    servers: int
    resources: dict[str, float]  # of each process
    strategy: str
    wait_s: float
    function: str = ""  # a directory with what pl.ray.run ships


class StartAgent(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    host: str
    directory: str
    python: str  # "": the interpreter of Ray's workers there
    activation: str
    module: str
    invitation: str


class EndAgent(msgspec.Struct, frozen=True, tag="end"):
    """Close the standard input of the agent, or kill it."""

    host: str
    is_kill: bool = False


class Want(msgspec.Struct, frozen=True, tag="want"):
    """Have room for so many processes in all; `busy` has the workers that run, by host."""

    workers: int
    servers: int
    busy: dict[str, int] = {}


ToDriver = Acquire | StartAgent | EndAgent | Want


class Room(msgspec.Struct, frozen=True, tag="room"):
    """A node has room for so many processes now. The launcher may connect to it."""

    host: str  # its address
    workers: int
    servers: int


class Draining(msgspec.Struct, frozen=True, tag="draining"):
    """Ray drains a node: it will end it after so many seconds."""

    host: str
    why: str
    within_s: float | None = None


class Acquired(msgspec.Struct, frozen=True, tag="acquired"):
    rooms: tuple[Room, ...]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The job cannot run on this cluster; the driver ends."""

    why: str


class Said(msgspec.Struct, frozen=True, tag="said"):
    text: str


class AgentSaid(msgspec.Struct, frozen=True, tag="line"):
    """A line of an agent's standard error."""

    host: str
    text: str


class AgentEnded(msgspec.Struct, frozen=True, tag="ended"):
    """An agent has ended; `why` is empty if it ended by itself."""

    host: str
    exit_code: int
    why: str = ""


FromDriver = Room | Draining | Acquired | Refused | Said | AgentSaid | AgentEnded
