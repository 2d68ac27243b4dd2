"""The Slurm engine: hosts of the allocation, agents by `srun`, one for each host.

An agent is a step of one task that shares its node with everything else of the job (--overlap) and
does not end with another node (--no-kill). Processes of the job are children of agents, so Slurm
limits, counts and cleans them up like those of any other job.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence

from paceline.launcher.engines.agent_command import AGENT_COMMAND, AgentPlace
from paceline.launcher.engines.engine import start_child
from paceline.launcher.hosts.host_list import HostSlots

_REMEDY = "run this in an allocation of Slurm, with srun in PATH"
_STEP = (
    *("srun", "--nodes=1", "--ntasks=1", "--overlap", "--no-kill", "--kill-on-bad-exit=0"),
    # All of the node's part of the allocation, not the share of one task.
    *("--mem=0", "--cpu-bind=none", "--quiet", "--unbuffered", "--job-name=paceline-agent"),
)
# srun reads the options of the batch script from these, where they would win over the step's own.
_OF_BATCH_SCRIPT = re.compile(
    r"SLURM_(NTASKS.*|NPROCS|TASKS_PER_NODE|CPUS_PER_TASK|CPU_BIND.*|MEM_.*|DISTRIBUTION|EXACT|"
    r"EXCLUSIVE|NNODES|THREADS_PER_CORE|JOB_NAME|HINT)|SRUN_CPUS_PER_TASK"
)
_ENDED = re.compile(
    r"Node failure|NODE_?FAIL|[Jj]ob.*(completing|completed)|Job step aborted|CANCEL"
)


class SlurmEngine:
    """Starts agents by srun inside the allocation that `environ` describes."""

    name = "slurm"

    def __init__(
        self, hosts: Sequence[HostSlots], place: AgentPlace, environ: Mapping[str, str]
    ) -> None:
        self._hosts, self._place = list(hosts), place
        self._environ = {
            name: value for name, value in environ.items() if not _OF_BATCH_SCRIPT.fullmatch(name)
        }

    def hosts(self) -> list[HostSlots]:
        """Return the hosts with their slots, in the order of ranks."""
        return list(self._hosts)

    async def start_agent(self, host: HostSlots, invitation: bytes) -> asyncio.subprocess.Process:
        """Start an agent as a step of the job; see Engine."""
        command = [*_STEP, f"--nodelist={host.name}", *AGENT_COMMAND]
        lines = self._place.stdin(invitation)
        return await start_child(command, lines, remedy=_REMEDY, environ=self._environ)

    def explain(self, host: HostSlots, exit_code: int, errors: str) -> str:
        """Return one sentence: why a child of `start_agent` ended, and what to do."""
        said = [line for line in errors.splitlines() if line.startswith("srun: error:")]
        ours = "\n".join(line for line in errors.splitlines() if not line.startswith("srun:"))
        if words := self._place.explain(host.name, exit_code, ours):
            return words
        last = said[-1].removeprefix("srun: error:").strip() if said else f"exit code {exit_code}"
        if _ENDED.search(last):
            return f"Slurm has ended the agent on host {host.name}: {last}"
        if said and not re.search(r"Exited with|task \d+", last):
            return f"srun cannot start an agent on host {host.name}: {last}"
        return f"the agent on host {host.name} ended ({last})"

    async def close(self) -> None:
        """Do nothing: a step ends with its agent."""
