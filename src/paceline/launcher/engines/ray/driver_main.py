"""The driver of a job on Ray: a child of the launcher that is connected to the cluster.

It is a process of its own because Ray brings threads, signal handlers and prints of its own, and
ends its process if the head is gone. It reads messages on standard input and ends with it; so do,
by Ray, its actors and placement groups. Commands and news are handled in one loop; a thread reads.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import LaunchError
from paceline.launcher.engines.agent_command import AGENT_COMMAND, AgentPlace
from paceline.launcher.engines.ray import messages as m
from paceline.launcher.engines.ray import node_actor
from paceline.launcher.engines.ray.connection import INIT_S, connect, import_ray, no_answer
from paceline.launcher.engines.ray.function import FUNCTION_FILE, result_file
from paceline.launcher.engines.ray.placements import Placements
from paceline.runtime.config import inherited_environ

_TICK_S = 0.1
_ROOMS_S = 0.5  # between two looks at the placement groups
_SHUTDOWN_S = 1.5
_MAX_OFFERS = 3  # of a node whose agent keeps ending
LOST = -1  # the exit code of an agent that was lost with its actor
_decoder: msgspec.json.Decoder[m.ToDriver] = msgspec.json.Decoder(m.ToDriver)


@dataclass
class Agent:
    """One agent, and the actor that runs it."""

    host: str
    actor: Any
    place: AgentPlace
    lines: list[str] = field(default_factory=list)
    is_ended_by_launcher: bool = False


class Driver:
    """Serves one launcher; `send` gives it a message."""

    def __init__(self, ray: Any, asked: m.Acquire, send: Callable[[m.FromDriver], None]) -> None:
        self._ray, self._asked, self._send = ray, asked, send
        self._placements = Placements(ray, asked, lambda text: send(m.Said(text)))
        self._rooms: dict[str, m.Room] = {}
        self._looked_s = 0.0
        self._agents: dict[str, Agent] = {}
        self._waits: dict[Any, Callable[[Any], None]] = {}  # by Ray's reference
        self._hosts_of: dict[Any, Agent] = {}
        self._ends: dict[str, int] = {}  # how often the agent of a host ended by itself
        self._draining: set[str] = set()  # hosts that the launcher knows of
        self._function: Any = None
        # Ray's workers get this file's code, not its name: Paceline need not be installed there.
        ray.cloudpickle.register_pickle_by_value(node_actor)
        self._actor_class = ray.remote(node_actor.NodeActor)
        runtime_env = ray.get_runtime_context().runtime_env
        self._has_working_dir = bool(runtime_env.get("working_dir"))

    def acquire(self) -> None:
        """Wait for room, and tell the launcher where it is; raises LaunchError."""
        if self._asked.function:
            data = (Path(self._asked.function) / FUNCTION_FILE).read_bytes()
            self._function = self._ray.put(data)
        self._rooms = self._placements.acquire()
        self._send(m.Acquired(tuple(self._rooms.values())))

    def serve(self, commands: queue.Queue[m.ToDriver | None]) -> None:
        """Handle messages of the launcher and news of Ray until standard input ends."""
        while True:
            try:
                command = commands.get(timeout=_TICK_S)
                if command is None:
                    return
                self._on_command(command)
            except queue.Empty:
                pass
            self._on_news()
            if time.monotonic() - self._looked_s > _ROOMS_S:
                self._looked_s = time.monotonic()
                self._look_for_rooms()

    def _on_command(self, command: m.ToDriver) -> None:
        if isinstance(command, m.StartAgent):
            self._start(command)
        elif isinstance(command, m.EndAgent) and command.host in self._agents:
            agent = self._agents[command.host]
            agent.is_ended_by_launcher = True
            agent.actor.end.remote(command.is_kill)
        elif isinstance(command, m.Want):
            self._placements.want(command.workers, command.servers, command.busy)

    # -- agents ----------------------------------------------------------------------------------

    def _start(self, command: m.StartAgent) -> None:
        try:
            strategy = self._placements.strategy(command.host)
        except LaunchError as error:
            self._send(m.AgentEnded(command.host, LOST, str(error)))
            return
        actor = self._actor_class.options(
            num_cpus=0, max_concurrency=4, max_restarts=0, scheduling_strategy=strategy
        ).remote()
        place = AgentPlace(command.directory, command.python, command.activation, command.module)
        agent = self._agents[command.host] = Agent(command.host, actor, place)

        def begin(facts: tuple[str, str]) -> None:
            directory = facts[0] if self._has_working_dir else command.directory
            python = command.python or facts[1]
            agent.place = AgentPlace(directory, python, command.activation, command.module)
            first_bytes = agent.place.stdin(command.invitation.encode())
            started = actor.start.remote(list(AGENT_COMMAND), first_bytes, self._function)
            self._await(agent, started, lambda _: self._await_news(agent))

        self._await(agent, actor.facts.remote(), begin)

    def _await(self, agent: Agent, reference: Any, then: Callable[[Any], None]) -> None:
        self._waits[reference], self._hosts_of[reference] = then, agent

    def _await_news(self, agent: Agent) -> None:
        self._await(agent, agent.actor.next.remote(), lambda news: self._on_agent(agent, *news))

    def _on_news(self) -> None:
        if not self._waits:
            return
        ready, _ = self._ray.wait(list(self._waits), num_returns=len(self._waits), timeout=0)
        for reference in ready:
            then, agent = self._waits.pop(reference), self._hosts_of.pop(reference)
            try:
                value = self._ray.get(reference)
            except Exception as error:  # of many kinds, also those of the node and of a runtime_env
                self._on_lost(agent, error)
            else:
                then(value)

    def _on_agent(
        self, agent: Agent, lines: list[str], code: int | None, results: dict[int, bytes]
    ) -> None:
        agent.lines += lines
        for line in lines:
            self._send(m.AgentSaid(agent.host, line))
        if code is None:
            self._await_news(agent)
            return
        for rank, result in results.items():
            result_file(self._asked.function, rank).write_bytes(result)
        why = agent.place.explain(agent.host, code, "\n".join(agent.lines)) or ""
        self._on_ended(agent, code, why)
        self._ray.kill(agent.actor)

    def _on_lost(self, agent: Agent, error: Exception) -> None:
        words = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = f"Ray has lost the actor on {agent.host}: {' '.join(words)[:300]}"
        self._on_ended(agent, LOST, why)

    def _on_ended(self, agent: Agent, code: int, why: str) -> None:
        if self._agents.get(agent.host) is not agent:
            return  # the launcher has given it up, and started another one
        del self._agents[agent.host]
        self._send(m.AgentEnded(agent.host, code, why))
        if not agent.is_ended_by_launcher:
            self._ends[agent.host] = self._ends.get(agent.host, 0) + 1
            if self._ends[agent.host] <= _MAX_OFFERS:
                self._rooms.pop(agent.host, None)  # so that it is offered again, if it is alive

    # -- room --------------------------------------------------------------------------------

    def _look_for_rooms(self) -> None:
        """Tell the launcher which nodes have more or less room than before."""
        before, self._rooms = self._rooms, self._placements.rooms()
        for host, room in self._rooms.items():
            if before.get(host) != room:
                self._send(room)
        for host in before.keys() - self._rooms.keys():
            self._send(m.Room(host, 0, 0))
        for host, within_s in self._placements.draining().items():
            if host not in self._draining:
                self._send(m.Draining(host, "Ray drains its node", within_s))
            self._draining.add(host)


def main() -> int:
    """Serve the launcher at standard input and output; return the exit code."""
    output = os.dup(1)
    os.dup2(2, 1)  # what Ray and others print is no message

    def send(message: m.FromDriver) -> None:
        data = msgspec.json.encode(message) + b"\n"
        while data:
            data = data[os.write(output, data) :]

    commands: queue.Queue[m.ToDriver | None] = queue.Queue()
    asked = _decoder.decode(sys.stdin.buffer.readline())
    assert isinstance(asked, m.Acquire)
    is_serving = threading.Event()
    threading.Thread(target=_read, args=(commands, is_serving), daemon=True).start()
    late = threading.Timer(INIT_S, lambda: _refuse(send, no_answer(asked.address)))
    late.daemon = True
    try:
        ray = import_ray()
        late.start()
        connect(ray, asked.address, asked.job_id, inherited_environ())
        late.cancel()
        driver = Driver(ray, asked, send)
        driver.acquire()
        is_serving.set()
        driver.serve(commands)
    except LaunchError as error:
        send(m.Refused(str(error)))
        return 1
    threading.Timer(_SHUTDOWN_S, lambda: os._exit(0)).start()
    ray.shutdown()
    os._exit(0)


def _refuse(send: Callable[[m.FromDriver], None], why: str) -> None:
    send(m.Refused(why))
    os._exit(1)


def _read(commands: queue.Queue[m.ToDriver | None], is_serving: threading.Event) -> None:
    for line in sys.stdin.buffer:
        commands.put(_decoder.decode(line))
    if not is_serving.is_set():  # the launcher is gone, and Ray may block
        os._exit(1)
    commands.put(None)


if __name__ == "__main__":
    sys.exit(main())
