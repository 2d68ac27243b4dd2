"""Jobs over hosts under bad conditions: full disks, late servers, Ctrl-C, no encryption."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from support.cluster.host_job import TRAIN, HostJob
from support.cluster.ssh_cluster import SshCluster

pytestmark = [pytest.mark.root, pytest.mark.cluster, pytest.mark.timeout(240)]

HOSTS = ("--hosts", "a:1,b:1,c:1")
# When the file `fill` exists, rank 1 writes into its scratch directory until that is full.
FILLS_SCRATCH = TRAIN.replace(
    "    time.sleep",
    """    if pl.rank() == 1 and os.path.exists("fill"):
        with open("/run/scratch/batches", "wb") as scratch:
            while True:
                scratch.write(bytes(1 << 16))
    time.sleep""",
)


def mount_small(cluster: SshCluster, host: str, directory: Path | str, full: bool = False) -> None:
    """Mount a file system of 256 kB on a host only."""
    fill = f"dd if=/dev/zero of={directory}/full bs=4k; true" if full else "true"
    mount = f"mkdir -p {directory} && mount -t tmpfs -o size=256k tmpfs {directory} && ({fill})"
    done = cluster[host].run(["sh", "-c", mount])
    assert done.returncode == 0, done.stderr


def unmount(cluster: SshCluster, host: str, directory: Path | str) -> None:
    cluster[host].run(["umount", "-l", str(directory)])


def test_full_disks_while_a_job_runs(cluster: SshCluster, tmp_path: Path) -> None:
    """Full log directory: the job continues. Full scratch on a host: its rank is the cause."""
    mount_small(cluster, "a", tmp_path / "runs")
    mount_small(cluster, "b", "/run/scratch")
    try:
        job = HostJob(cluster, tmp_path, *HOSTS, "--env", "STEPS=2000", script=FILLS_SCRATCH)
        job.wait_for("step 10")
        cluster["a"].run(["dd", "if=/dev/zero", f"of={tmp_path}/runs/full", "bs=4k"])
        job.wait_for("cannot be written any more: No space left on device; the job continues")
        num_lines = len(job.lines)
        job.wait_for("] step", after=num_lines)
        (tmp_path / "fill").touch()
        assert job.result() == 1, job.output
    finally:
        unmount(cluster, "a", tmp_path / "runs")
        unmount(cluster, "b", "/run/scratch")
    (line,) = (line for line in job.lines if "failed first" in line)
    assert "rank 1 failed first: exit code 1" in line and "on host b" in line, line
    assert "  | OSError: [Errno 28] No space left on device" in job.output, job.output
    assert "ranks 0, 2: stopped because rank 1 failed" in job.output


def test_a_host_without_room_for_the_job_directory_is_reported(
    cluster: SshCluster, tmp_path: Path
) -> None:
    mount_small(cluster, "b", "/run/job", full=True)
    try:
        activate = ("--activate", "export XDG_RUNTIME_DIR=/run/job")
        job = HostJob(cluster, tmp_path, *HOSTS, *activate, "--python", sys.executable)
        assert job.result() == 1, job.output
    finally:
        unmount(cluster, "b", "/run/job")
    assert "1 host cannot run the job; nothing was started" in job.output, job.output
    words = "b  cannot create a job directory in /run/job: No space left on device; free some space"
    assert words in job.output, job.output


def test_late_and_unused_servers_delay_a_job_but_do_not_hang_it(
    cluster: SshCluster, tmp_path: Path
) -> None:
    """Every server waits for each worker in turn, also for partitions that hold nothing."""
    job = HostJob(cluster, tmp_path, *HOSTS, "-s", "3", "--pace", "ps", "--env", "STEPS=30")
    deadline_s = time.monotonic() + 60
    while not (late := [p for p in cluster["b"].processes() if is_server(p.environ)]):
        assert time.monotonic() < deadline_s, job.output
        time.sleep(0.005)
    job.signal(late[0], signal.SIGSTOP)
    job.wait_for("waits for server 1 to join")
    assert "step 0" not in job.output
    job.signal(late[0], signal.SIGCONT)
    assert job.result() == 0, job.output
    assert "nothing on servers 1, 2" in job.output, job.output
    assert sum("] done" in line for line in job.lines) == 3, job.output


def is_server(environ: Mapping[str, str]) -> bool:
    return environ.get("PACELINE_ROLE") == "server"


@pytest.mark.parametrize("is_elastic", [False, True])
def test_a_job_without_encryption_says_so_and_records_it(
    cluster: SshCluster, tmp_path: Path, is_elastic: bool
) -> None:
    """Ctrl-C then ends it: workers of other hosts get SIGTERM before they lose their peers."""
    options = ["--no-encrypt", *(["--on-loss", "replace"] if is_elastic else [])]
    job = HostJob(cluster, tmp_path, *HOSTS, *options, "--env", "STEPS=5000")
    job.wait_for("step 10")
    assert job.output.count("connections between hosts are not encrypted") == 1, job.output
    (facts,) = tmp_path.glob("paceline-*-job-*/job.json")
    assert json.loads(facts.read_text())["encryption"] == "off"
    for host in "ab":  # commands connect to the job as its processes do
        status = job.paceline("status", on=host)
        assert status.returncode == 0 and "worker 2 (rank 2, host c" in status.stdout, status
    job.interrupt()
    assert job.result() == 130, job.output
    assert "did not end on SIGTERM" not in job.output
    assert "3 ranks stopped by SIGINT" in job.output


def test_ctrl_c_during_setup_prints_no_errors(cluster: SshCluster, tmp_path: Path) -> None:
    """Ranks 1 and 2 wait for rank 0 to join. They must not ignore SIGTERM."""
    script = TRAIN.replace("pl.init()", "print('here', flush=True)\nWAIT\npl.init()").replace(
        "WAIT", 'time.sleep(30 if os.environ["RANK"] == "0" else 0)'
    )
    job = HostJob(cluster, tmp_path, *HOSTS, script=script)
    for rank in range(3):
        job.wait_for(f"[{rank}] here")
    job.interrupt()
    assert job.result(timeout_s=30) == 130, job.output
    assert "Traceback" not in job.output and "did not end" not in job.output, job.output
