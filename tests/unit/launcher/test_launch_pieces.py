"""The small parts of the launcher: job directory, machine, specification, guard."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import ConfigError, LaunchError
from paceline.launcher.job_directory import JobDirectory, sweep
from paceline.launcher.processes.guard_main import end_processes, job_processes
from paceline.launcher.spec import RunSpec, parse_env
from paceline.pace.parse import parse as parse_pace
from paceline.runtime.formatting import memory_size
from paceline.runtime.machine import OomCount, memory, usable_cores
from paceline.runtime.process_names import ProcessName


def test_a_job_directory_is_private_and_goes_away(tmp_path: Path) -> None:
    with JobDirectory(tmp_path) as job:
        assert job.path.stat().st_mode & 0o777 == 0o700
        assert sweep(tmp_path) == [], "its launcher lives"
    assert list(tmp_path.iterdir()) == []


def test_the_directory_of_a_dead_launcher_is_swept(tmp_path: Path) -> None:
    dead = (
        "import os, sys; from pathlib import Path; from paceline.launcher.job_directory import *;"
    )
    dead += "JobDirectory(Path(sys.argv[1])); os._exit(0)"
    subprocess.run([sys.executable, "-c", dead, str(tmp_path)], check=True)
    (left,) = tmp_path.iterdir()
    assert sweep(tmp_path) == [left] and list(tmp_path.iterdir()) == []


def test_sweeping_follows_no_links(tmp_path: Path) -> None:
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "lock").touch()
    (tmp_path / f"paceline-{os.getuid()}-job-evil").symlink_to(treasure)
    assert sweep(tmp_path) == [] and (treasure / "lock").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="nowhere"):
        JobDirectory(tmp_path / "nowhere")


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_control_groups_of_version_2_are_read(tmp_path: Path) -> None:
    root = _tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 500 kB\n",
            "proc/vmstat": "pgfault 1\noom_kill 9\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/b/memory.events": "oom 2\noom_kill 4\n",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            "sys/fs/cgroup/a/memory.max": "4096\n",
            "sys/fs/cgroup/a/memory.peak": "2048\n",
            "sys/fs/cgroup/a/cpu.max": "50000 100000\n",
        },
    )
    found = memory(root)
    assert (found.limit_bytes, found.peak_bytes, found.total_bytes) == (4096, 2048, 1000 * 1024)
    assert usable_cores(root) == 1
    assert OomCount.read(root) == OomCount(4, 9)


def test_control_groups_of_version_1_are_read(tmp_path: Path) -> None:
    root = _tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/not/mounted\n0::/\n",
            "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "8192\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n",
            "sys/fs/cgroup/memory/x/memory.oom_control": "under_oom 0\noom_kill 1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert memory(root).limit_bytes == 8192
    assert usable_cores(root) == 1
    assert OomCount.read(root).group == 1


def test_a_machine_without_any_of_it_is_unknown_not_wrong(tmp_path: Path) -> None:
    found = memory(tmp_path)
    assert (found.limit_bytes, found.total_bytes) == (None, None)
    assert memory_size(None) == "unknown" and memory_size(3 << 29) == "1.5 GiB"


def test_a_spec_is_checked_when_it_is_made(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.touch()
    spec = RunSpec(target=str(script), arguments=("a",), num_workers=2)
    assert spec.command(ProcessName(0, 0)).argv == [sys.executable, str(script), "a"]
    with pytest.raises(ConfigError, match="NUL"):
        RunSpec(target=str(script), arguments=("a\0b",), num_workers=2)
    with pytest.raises(ConfigError, match="only one"):
        env = parse_env(["OMP_NUM_THREADS=2"])
        RunSpec(target=str(script), num_workers=2, threads_per_worker=1, env=env)
    with pytest.raises(ConfigError, match="only one"):
        env = parse_env(["PACELINE_PACE=allreduce"])
        RunSpec(target=str(script), num_workers=2, pace=parse_pace("allreduce"), env=env)


def test_the_guard_touches_only_marked_processes() -> None:
    mark = f"mark-{os.getpid()}"  # these tests may run twice on one machine
    idle = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
    mine = subprocess.Popen(
        idle, env={**os.environ, "PACELINE_JOB": f"{mark}-1"}, stdout=subprocess.PIPE
    )
    other = subprocess.Popen(
        idle, env={**os.environ, "PACELINE_JOB": f"{mark}-12"}, stdout=subprocess.PIPE
    )
    with mine, other:
        for process in (mine, other):
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
        assert list(job_processes(f"{mark}-1", ())) == [mine.pid]
        assert end_processes(f"{mark}-1", (), within_s=60) == []
        assert mine.wait(60) == -9
        assert other.poll() is None
        other.kill()
