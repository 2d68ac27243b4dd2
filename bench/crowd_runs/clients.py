"""Many clients of one server in one process, each with its own engine and its own TCP connection.

    python -m crowd_runs.clients FIRST COUNT WORLD ELEMENTS     (started by many_clients.py)

The coordinator's address and the job's secret come from the environment. Each client is a worker of
the job on a host of its own, so that it shares no memory with the server. After "ready", each line
on standard input is a number of seconds: for that long every client pushes and pulls without a
pause, one request at a time. The answer is a JSON list: how many requests each client has finished.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline import _core
from paceline.comm.endpoint import Endpoint
from paceline.comm.fabric import Fabric, JobScope
from paceline.control.client.agent import Agent
from paceline.control.member import Member
from paceline.control.transport.auth import load_secret
from paceline.control.transport.loop_thread import LoopThread
from paceline.control.transport.peer_connections import LinkListener
from paceline.ps import Client
from paceline.ps.client import session

_JOIN_S = 300.0
KEY = "weights"


@dataclass
class Place:
    """Where the clients of this process are in their job."""

    address: str
    job_id: str
    secret: bytes
    world: int
    thread: LoopThread  # of all listeners


def join(place: Place, rank: int) -> Fabric:
    """Join the job as a worker. Blocks until all have joined."""
    agent = Agent.connect(place.address, place.secret, place.job_id, rank, timeout_s=_JOIN_S)
    agent.num_workers, agent.num_servers = place.world, 1
    listener = LinkListener(
        place.secret,
        place.job_id,
        rank,
        want_tcp=True,
        thread=place.thread,
        choose_cipher=_core.preferred_cipher,
    )
    me = Member(
        rank=rank,
        role="worker",
        host_id=f"client {rank}",
        hostname=socket.gethostname(),
        pid=os.getpid(),
        local_rank=0,
        unix=listener.unix_name,
        tcp=listener.tcp_address,
        number=rank,
    )
    membership = agent.join(me, _JOIN_S)
    engine = _core.Engine(rank, 64, 600.0, 60.0, 60.0)  # 64: more processes than cores
    endpoint = Endpoint(rank, engine, listener, me, _JOIN_S, agent.presence, 60.0)
    return Fabric(endpoint, JobScope(membership))


class Load:
    """One client that pushes and pulls for a while."""

    def __init__(self, client: Client, elements: int) -> None:
        self._client = client
        self._grad, self._out = torch.ones(elements), torch.empty(elements)
        client.init(KEY, torch.zeros(elements), "SGD", lr=1e-6)

    def run(self, seconds: float, start: threading.Barrier) -> int:
        """Return how many requests were answered in time."""
        start.wait()
        until_s, done = time.monotonic() + seconds, 0
        while True:
            self._client.push_pull(KEY, self._grad, self._out).wait()
            if time.monotonic() > until_s:
                return done
            done += 1


def main() -> None:
    first, count, world, elements = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    place = Place(
        os.environ["PACELINE_COORDINATOR"],
        os.environ["PACELINE_JOB"],
        load_secret(Path(os.environ["PACELINE_SECRET_FILE"])),
        world,
        LoopThread("paceline-links"),
    )
    ranks = range(first, first + count)
    with ThreadPoolExecutor(count) as pool:
        fabrics = list(pool.map(lambda rank: join(place, rank), ranks))
        clients = []
        for fabric in fabrics:  # one after the other: a client belongs to the current session
            session.establish(fabric)
            clients.append(Client("async"))
        loads = list(pool.map(lambda client: Load(client, elements), clients))
        print("ready", flush=True)
        for line in sys.stdin:
            start = threading.Barrier(count)
            counts = list(pool.map(Load.run, loads, [float(line)] * count, [start] * count))
            print(json.dumps(counts), flush=True)
    os._exit(0)  # the server and the coordinator are ended by the parent


if __name__ == "__main__":
    main()
