"""What another server can make a server process do."""

from __future__ import annotations

import pytest

from paceline import _core
from paceline.comm.endpoint import Endpoint
from paceline.comm.fabric import Fabric, JobScope
from paceline.control.client.local_agent import LocalAgent
from paceline.control.member import Member
from paceline.errors import BadFrame
from paceline.ps.replication import chain as r
from paceline.ps.replication import messages as p
from paceline.ps.server.process import ServerProcess
from paceline.runtime.config import JobEnv


@pytest.fixture
def server() -> ServerProcess:
    me = Member(0, "server", "host", "host", 1, 0, "unix", "", 0)
    agent = LocalAgent()
    endpoint = Endpoint(0, _core.Engine(0, 1, 60.0, 60.0, 60.0), None, me, 60.0)
    env = JobEnv(
        rank=0,
        world_size=0,
        local_rank=0,
        local_world_size=1,
        source="test",
        role="server",
        num_servers=1,
        job_id="job",
        coordinator=None,
        secret_file=None,
        host_id="host",
        bind_address="127.0.0.1",
    )
    return ServerProcess(Fabric(endpoint, JobScope(agent.join(me))), env, agent)


def test_messages_about_unknown_partitions_create_none(server: ServerProcess) -> None:
    for index in (-1, 1, 1 << 40):
        with pytest.raises(BadFrame, match=rf"partition {index}, but there are 1"):
            server._find_landing(p.ControlMessage(index, 1, r.Ack(1, 0)))
    assert not server.partitions
    server._find_landing(p.ControlMessage(0, 1, r.Ack(1, 0)))
    assert list(server.partitions) == [0]
