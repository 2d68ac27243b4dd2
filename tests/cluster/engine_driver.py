"""Starts agents through an engine, as the launcher would; runs on a test host.

stdin: JSON with "engine", "hosts" (name, slots, user, port), "place" (see AgentPlace), "directory"
and "invitation". With "hold" it prints a line for each agent that has started and keeps them until
it is killed; otherwise it waits for their end and prints JSON: for each host exit code, stderr and
the explanation. With "sync" it first copies that directory, and prints the result as JSON.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from paceline.launcher.engines.agent_command import AgentPlace
from paceline.launcher.engines.slurm import SlurmEngine
from paceline.launcher.engines.slurm_allocation import slurm_hosts
from paceline.launcher.engines.ssh import SshEngine
from paceline.launcher.engines.sync import sync_project
from paceline.launcher.hosts.host_list import HostSlots


async def start(engine: Any, host: HostSlots, invitation: bytes, hold: bool) -> dict[str, Any]:
    begun = time.monotonic()
    child = await engine.start_agent(host, invitation)
    assert child.stderr is not None
    if hold:
        line = await child.stderr.readline()
        print(host.name, line.decode().strip(), flush=True)
    errors = (await child.stderr.read()).decode()
    code = await child.wait()
    return {
        "host": host.name,
        "code": code,
        "errors": errors,
        "words": engine.explain(host, code, errors),
        "after_s": time.monotonic() - begun,
    }


async def main() -> None:
    asked = json.loads(sys.stdin.readline())
    place = AgentPlace(**asked["place"])
    engine: Any
    if asked.get("engine") == "slurm":
        engine = SlurmEngine(slurm_hosts(os.environ), place, os.environ)
    else:
        hosts = [HostSlots(*one) for one in asked["hosts"]]
        engine = SshEngine(hosts, place, Path(asked["directory"]))
    if "sync" in asked:
        source, rsync = Path(asked["sync"]), asked.get("has_rsync")
        done = await sync_project(engine, source, engine.hosts(), has_rsync=rsync)
        print(json.dumps(dataclasses.asdict(done)), flush=True)
    words = json.dumps(asked["invitation"]).encode()
    ends = [start(engine, host, words, asked.get("hold", False)) for host in engine.hosts()]
    results = await asyncio.gather(*ends)
    await engine.close()
    print(json.dumps(results))


if __name__ == "__main__":
    asyncio.run(main())
