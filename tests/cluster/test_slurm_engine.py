"""The Slurm engine in allocations of a real Slurm: hosts, slots, agents, and what it refuses."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path

import pytest
from driver import Driver

from paceline.errors import ConfigError
from paceline.launcher.engines.slurm_allocation import expand_runs, slurm_hosts
from paceline.launcher.hosts.host_list import HostSlots

IN_JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "b,c", "SLURM_JOB_CPUS_PER_NODE": "8(x2)"}


@pytest.mark.parametrize(
    ("more", "slots"),
    [
        ({}, (8, 8)),
        ({"SLURM_CPUS_PER_TASK": "4"}, (2, 2)),
        ({"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2,1"}, (2, 1)),
        ({"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"}, (2, 2)),
        ({"SLURM_STEP_ID": "4294967290"}, (8, 8)),  # the shell of salloc
        ({"SLURMD_NODENAME": "b"}, (8, 8)),  # a batch script
    ],
)
def test_hosts_and_slots_of_an_allocation(more, slots):
    assert slurm_hosts({**IN_JOB, **more}) == (HostSlots("b", slots[0]), HostSlots("c", slots[1]))


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**IN_JOB, "SLURM_STEP_ID": "0"},  # a task of srun
        {**IN_JOB, "SLURM_JOB_NODELIST": "b", "SLURMD_NODENAME": "b"},
    ],
)
def test_no_hosts_where_the_job_needs_none(environ):
    assert slurm_hosts(environ) == ()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"SLURM_ARRAY_TASK_ID": "3"}, "job 7 is task 3 of a job array; .* submit one job"),
        ({"SLURM_HET_SIZE": "2"}, r"heterogeneous \(2 components\), .* as one component"),
        ({"SLURM_JOB_CPUS_PER_NODE": "8"}, "does not fit the 2 nodes"),
        ({"SLURM_JOB_CPUS_PER_NODE": "8x"}, r"expected a form like '4\(x2\),1'"),
    ],
)
def test_allocations_that_are_refused(more, words):
    with pytest.raises(ConfigError, match=words):
        slurm_hosts({**IN_JOB, **more})


def test_run_lengths():
    assert expand_runs("4(x2),1", "X") == [4, 4, 1]


# -- a real Slurm -------------------------------------------------------------------------------


class SlurmDriver(Driver):
    """Starts echo agents in a batch script on all nodes of its allocation."""

    def batch(self, *options: str, place: dict[str, str] | None = None, **more):
        """Run the batch script to its end; return for each host how its agent ended."""
        script, output = self.scratch / "job.sh", self.scratch / "job.out"
        words = self.words(engine="slurm", place=place, **more).strip()
        command = f"{shlex.join(self.command)} <<'END'\n{words}\nEND\n"
        script.write_text(f"#!/bin/bash\n{command}")
        done = self.cluster.run(
            "sbatch", "--wait", f"--output={output}", *options, str(script), cwd=self.scratch
        )
        assert done.returncode == 0, done.stderr + output.read_text()
        return {end["host"]: end for end in json.loads(output.read_text().splitlines()[-1])}


@pytest.fixture
def driver(slurm, tmp_path: Path) -> SlurmDriver:
    return SlurmDriver(slurm, tmp_path)


@pytest.mark.cluster
@pytest.mark.parametrize(
    "options",
    [("-N2",), ("-N2", "-n6", "--ntasks-per-node=3"), ("-N2", "-n2", "-c2", "--mem-per-cpu=100")],
)
def test_agents_start_on_every_node(driver, options):
    ends = driver.batch(*options, invitation={"ends": 7})
    assert {name: end["code"] for name, end in ends.items()} == {"b": 7, "c": 7}, ends
    for name in ("b", "c"):
        assert driver.seen(name)["host"] == name
        assert driver.seen(name)["directory"] == str(driver.scratch)


@pytest.mark.cluster
def test_words_for_what_goes_wrong(driver):
    ends = driver.batch("-N2", place={"directory": "/no/such place"})
    assert "host c has no directory /no/such place that you can enter" in ends["c"]["words"]
    ends = driver.batch("-N2", place={"python": "/opt/none/python"})
    assert "host b has no Python at /opt/none/python" in ends["b"]["words"]


@pytest.mark.cluster
@pytest.mark.slow
def test_a_lost_node_leaves_the_agent_of_the_other(driver):
    script = driver.scratch / "job.sh"
    words = driver.words(engine="slurm", hold=True).strip()
    script.write_text(f"#!/bin/bash\n{shlex.join(driver.command)} <<'END'\n{words}\nEND\n")
    submit = ("sbatch", "-N2", "--no-kill", f"--output={driver.scratch}/out", str(script))
    driver.cluster.run(*submit)
    deadline = time.monotonic() + 20
    while len(list(driver.scratch.glob("seen.?"))) < 2:
        assert time.monotonic() < deadline, driver.cluster.left()
        time.sleep(0.05)
    driver.cluster["c"].power_off()
    while "DOWN" not in (state := driver.cluster.run("sinfo", "-hNo", "%N %T").stdout.upper()):
        assert time.monotonic() < deadline + 60, state
        time.sleep(0.2)
    assert any("echo_agent" in p.command for p in driver.cluster["b"].processes())
    assert not (driver.scratch / "seen.b.end").exists()
    driver.cluster.run("scancel", "--user=root")
