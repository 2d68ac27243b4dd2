"""Both ends of an agent that runs in a pod: its stdin and stderr, over an authenticated connection.

    launcher: PodAgent   --- Input, ..., end of the connection --->   pod: serve_agent
                        <--- Errors, Leaving, ..., Ended ---          the agent, a child

The connection is the agent's life line. If it ends, the pod closes the agent's stdin, and the agent
ends every process of the job in the pod.

Threads: one loop at each end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec

from paceline.control.transport.acceptor import introduce_control
from paceline.control.transport.auth import CallerHandshake
from paceline.control.transport.channel import Channel
from paceline.control.transport.sockets import connect_tcp, die_soon
from paceline.errors import PacelineError
from paceline.launcher.engines.agent_command import AGENT_COMMAND

POD = "pod"  # the name of a pod's program in the handshake
LAUNCHER = "launcher"
AGENT, LOOK = "agent", "look"  # purposes of a connection
LOST = 255  # the exit code of an agent whose connection broke
_PING_S = 0.5
_END_S = 10.0  # for an agent to end everything in the pod
_PIECE_BYTES = 1 << 16


class Input(msgspec.Struct, frozen=True, tag="in"):
    data: bytes


class Errors(msgspec.Struct, frozen=True, tag="err"):
    data: bytes


class Ended(msgspec.Struct, frozen=True, tag="end"):
    code: int


class Here(msgspec.Struct, frozen=True, tag="here"):
    """The answer to a look: the pod takes agents."""


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """Kubernetes ends the pod; another one will have its name."""


FromPod = Errors | Ended | Here | Leaving


_to_pod: msgspec.msgpack.Decoder[Input] = msgspec.msgpack.Decoder(Input)
_from_pod: msgspec.msgpack.Decoder[FromPod] = msgspec.msgpack.Decoder(FromPod)


# -- the launcher's end ---------------------------------------------------------------------------


async def dial(address: str, secret: bytes, job: str, purpose: str) -> Channel[FromPod]:
    """Connect to a pod; raises OSError if it does not listen, PacelineError if it is another."""
    handshake = CallerHandshake(
        secret, job_id=job, listener=POD, role=LAUNCHER, rank=0, purpose=purpose
    )
    sock = await connect_tcp(address)
    what = f"the pod at {address}"
    # Also with --no-encrypt: the secret of the job travels here.
    wire, session = await introduce_control(sock, handshake, what=what, setting="on")
    return await Channel.over(wire, session, _from_pod)


async def look(address: str, secret: bytes, job: str) -> None:
    """Return if a pod takes agents; raises as `dial` does, and EOFError if it is about to end."""
    channel = await dial(address, secret, job, LOOK)
    try:
        await channel.receive()
    finally:
        channel.close()


class PodAgent:
    """An agent in a pod, as the launcher holds it; see engine.AgentChild."""

    pid = 0

    def __init__(self, channel: Channel[FromPod], first_bytes: bytes) -> None:
        self._channel = channel
        self.returncode: int | None = None
        self.is_closed = False  # by the launcher
        self.is_leaving = False  # the pod is to end
        self.stderr = asyncio.StreamReader()
        die_soon(channel.socket)
        for start in range(0, len(first_bytes), _PIECE_BYTES):
            channel.send(Input(first_bytes[start : start + _PIECE_BYTES]))
        self._reading = asyncio.ensure_future(self._read())
        self._pinging = asyncio.ensure_future(self._ping())

    @property
    def stdin(self) -> PodAgent:
        """The life line: closing it is all that follows after the first bytes."""
        return self

    async def _ping(self) -> None:
        """Send something regularly, so that a pod that is gone without a word is noticed."""
        with suppress(OSError, PacelineError):
            while True:
                await asyncio.sleep(_PING_S)
                self._channel.send(Input(b""))

    async def _read(self) -> None:
        code = LOST
        try:
            while True:
                message = await self._channel.receive()
                if isinstance(message, Ended):
                    code = message.code
                    return
                if isinstance(message, Errors):
                    self.stderr.feed_data(message.data)
                elif isinstance(message, Leaving):
                    self.is_leaving = True
        except EOFError:  # the pod closed the connection: `code` says that the agent is lost
            return
        except (OSError, PacelineError) as error:
            why = getattr(error, "strerror", None) or str(error)
            self.stderr.feed_data(f"the connection to the pod broke: {why}\n".encode())
        finally:
            self._pinging.cancel()
            self.returncode = code
            self.stderr.feed_eof()
            self._channel.close()

    async def wait(self) -> int:
        await self._reading
        assert self.returncode is not None
        return self.returncode

    def close(self) -> None:
        self.is_closed = True
        self._channel.close()

    def kill(self) -> None:
        self.close()


# -- the pod's end --------------------------------------------------------------------------------


async def serve_agent(
    channel: Channel[Input],
    show: Callable[[bytes], None],
    on_start: Callable[[asyncio.subprocess.Process], None],
) -> None:
    """Run an agent on a connection until one of them ends. `show` gets what it prints."""
    child = await asyncio.create_subprocess_exec(
        *AGENT_COMMAND,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    on_start(child)
    feeding = asyncio.ensure_future(_feed(channel, child))
    try:
        assert child.stderr is not None
        while data := await child.stderr.read(_PIECE_BYTES):
            show(data)
            with suppress(OSError, PacelineError):
                channel.send(Errors(data))
        code = await child.wait()
        with suppress(OSError, PacelineError):
            channel.send(Ended(code if code >= 0 else 128 - code))
            await channel.finish()
    finally:
        feeding.cancel()
        channel.close()
        await _end(child)


async def _feed(channel: Channel[Input], child: asyncio.subprocess.Process) -> None:
    assert child.stdin is not None
    with suppress(EOFError, OSError, PacelineError):
        while True:
            child.stdin.write((await channel.receive()).data)
            await child.stdin.drain()
    child.stdin.close()


async def _end(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        assert child.stdin is not None
        child.stdin.close()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(child.wait(), _END_S)
    if child.returncode is None:
        child.kill()  # its guard ends what it started
        await child.wait()


def channel_decoder() -> msgspec.msgpack.Decoder[Input]:
    """Return the decoder of what a launcher sends."""
    return _to_pod
