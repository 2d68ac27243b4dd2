"""Test hosts as a real Slurm cluster: the first has the controller, the others are its nodes.

with SlurmCluster("a", "b", "c") as cluster:
    cluster["a"].run(["sbatch", "--wait", "job.sh"], env=cluster.environ)
"""

from __future__ import annotations

import os
import time
from typing import Any

from support.cluster.host import Host
from support.cluster.host_group import HostGroup
from support.cluster.requirements import SLURM_TOOLS, find_tool

_NODE_CPUS = 4  # a claim: nodes share the cores of this machine
_CONFIG = """
ClusterName=test
SlurmctldHost={controller}({controller_address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmctldPort=6817
SlurmdPort=6818
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
SlurmdTimeout=10
SlurmctldTimeout=10
InactiveLimit=0
EnforcePartLimits=ALL
KillWait=3
MessageTimeout=5
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MailProg=/bin/true
"""


class SlurmCluster(HostGroup):
    """A controller and its nodes, with a partition `debug` and one `short` of ten minutes."""

    tools = SLURM_TOOLS

    @property
    def environ(self) -> dict[str, str]:
        """Return what a process needs to find the controller."""
        return {"SLURM_CONF": str(self.directory / "slurm.conf")}

    @property
    def nodes(self) -> list[Host]:
        return self.hosts[1:]

    def run(self, *command: str, **options: Any) -> Any:
        """Run a command on the host of the controller, where users log in."""
        return self.hosts[0].run(command, env={**self.environ, **options.pop("env", {})}, **options)

    def _prepare(self) -> None:
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        (self.directory / "state").mkdir()
        # Without it, slurmd looks for control groups below /sys, which hosts do not have.
        (self.directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        first = self.hosts[0]
        lines = [
            _CONFIG.format(
                directory=self.directory, controller=first.name, controller_address=first.address
            )
        ]
        for node in self.nodes:
            (self.directory / f"spool.{node.name}").mkdir()
            size = f"CPUs={_NODE_CPUS} RealMemory=4000"
            lines.append(f"NodeName={node.name} NodeAddr={node.address} {size}\n")
        names = ",".join(node.name for node in self.nodes)
        lines.append(f"PartitionName=debug Nodes={names} Default=YES MaxTime=INFINITE State=UP\n")
        lines.append(f"PartitionName=short Nodes={names} MaxTime=10 State=UP\n")
        (self.directory / "slurm.conf").write_text("".join(lines))

    def boot(self, host: Host) -> None:
        """Start a host and its daemon of Slurm, also after it was killed."""
        super().boot(host)
        if host is self.hosts[0]:
            self._start_munge(host)
            self._start(host, "slurmctld", "-D", "-i")
            self._wait(lambda: self.run("scontrol", "ping").returncode == 0, "slurmctld")
        else:
            self._start(host, "slurmd", "-D")
            self._wait(lambda: self._state(host).startswith(("IDLE", "MIX", "ALLOC")), "slurmd")
        host.adopt_daemons()  # slurmctld has a helper

    def _start_munge(self, host: Host) -> None:
        names = ("key-file", "socket", "pid-file", "log-file", "seed-file")
        files = [f"--{name}={self.directory}/munge.{name.removesuffix('-file')}" for name in names]
        (self.directory / "munge.socket").unlink(missing_ok=True)
        self._start(host, "munged", "--foreground", "--force", *files)
        self._wait((self.directory / "munge.socket").exists, "munged")

    def _start(self, host: Host, name: str, *words: str) -> None:
        tool = find_tool(name)
        assert tool is not None
        log = self.directory / f"{name}.{host.name}.out"
        host.start_daemon([tool, *words], log, **self.environ)

    def _state(self, node: Host) -> str:
        return self.run("sinfo", "-hN", "-n", node.name, "-o", "%T").stdout.upper().strip()

    def _wait(self, is_ready: Any, name: str) -> None:
        deadline = time.monotonic() + 30
        while not is_ready():
            logs = "".join(path.read_text()[-2000:] for path in self.directory.glob(f"{name}*.log"))
            assert time.monotonic() < deadline, f"{name} does not start: {logs}"
            time.sleep(0.05)

    def wait_until_idle(self, within_s: float = 20.0) -> None:
        """Cancel all jobs and wait until nothing of them is left."""
        self.run("scancel", "--user=root")
        super().wait_until_idle(within_s)
