"""The options of a job on several hosts: what a RunSpec accepts, and the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.errors import ConfigError
from paceline.launcher.environment import JobAddresses
from paceline.launcher.hosts.host_list import HostSlots, parse_hosts
from paceline.launcher.job_registry import facts_of
from paceline.launcher.job_size import ServerPlan
from paceline.launcher.run_configuration import configuration
from paceline.launcher.spec import RunSpec
from paceline.runtime.mesh import Mesh

HOSTS = parse_hosts("a:4,b:4")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "PYTHON", "PACELINE_ENCRYPT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").write_text("")
    return "train.py"


def test_a_spec_places_its_processes(script: str) -> None:
    spec = RunSpec(target=script, num_workers=6, servers=ServerPlan(count=2), hosts=HOSTS)
    placement = spec.placement
    assert placement is not None
    assert [placement.host_of(name) for name in spec.process_names] == [0, 0, 0, 0, 1, 1, 0, 1]
    assert RunSpec(target=script, num_workers=6).placement is None
    mesh = RunSpec(
        target=script, num_workers=4, mesh=Mesh(dp=2, tp=2), hosts=parse_hosts("a:3,b:2")
    )
    assert mesh.placement is not None
    assert [mesh.placement.host_of(name) for name in mesh.process_names] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sync": True, "hosts": ()}, "--sync without hosts: the job runs on this host"),
        ({"encrypt": False, "hosts": ()}, "--no-encrypt without hosts"),
        ({"remote_python": "python3", "hosts": ()}, "--python without hosts"),
        ({"activate": ". v", "hosts": ()}, "--activate without hosts"),
        ({"servers_on": ("a",), "hosts": ()}, "--servers-on without hosts"),
        ({"servers_on": ("a",)}, "--servers-on without servers: add -s 1"),
        ({"servers_on": ("c",), "servers": ServerPlan(count=1)}, "'c' is not in the list of hosts"),
        (
            {"servers_on": ("a",), "servers": ServerPlan(count=2, is_colocated=True)},
            "--servers-on and -s colocated",
        ),
        ({"num_workers": 9}, "-n 9: the hosts have 8 slots"),
        ({"remote_python": " "}, "--python ' ': expected one line"),
        ({"activate": "a\nb"}, r"--activate 'a\\nb': expected one line"),
        ({"env": {"PACELINE_BIND": "1.2.3.4"}}, "--env PACELINE_BIND=... with hosts"),
        ({"env": {"PACELINE_HOST_ID": "x"}}, "--env PACELINE_HOST_ID=... with hosts"),
        ({"env": {"PACELINE_ENCRYPT": "on"}, "encrypt": False}, "set the same value"),
    ],
)
def test_options_that_do_not_go_together(script: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RunSpec(**{"target": script, "num_workers": 2, "hosts": HOSTS, **options})


def test_which_python_other_hosts_use(script: str) -> None:
    spec = RunSpec(target=script, num_workers=2, hosts=HOSTS)
    assert spec.remote_python_in({}) == sys.executable
    assert spec.remote_python_in({"PYTHON": "/opt/python"}) == "/opt/python"
    activated = RunSpec(target=script, num_workers=2, hosts=HOSTS, activate="conda activate x")
    assert activated.remote_python_in({}) == "python"
    named = RunSpec(target=script, num_workers=2, hosts=HOSTS, remote_python="python3.11")
    assert named.remote_python_in({"PYTHON": "/opt/python"}) == "python3.11"


def test_a_detached_job_on_hosts_can_be_read_by_its_next_supervisor(script: str) -> None:
    spec = RunSpec(
        target=script,
        num_workers=3,
        servers=ServerPlan(count=1),
        hosts=(HostSlots("a", 2), HostSlots("::1", 2, "bob", 2222)),
        servers_on=("::1",),
        sync=True,
        encrypt=False,
        remote_python="python3",
        activate=". v/bin/activate",
    )
    where = JobAddresses(job_id="j", coordinator="h:1", secret_file="f", master_port=1)
    assert facts_of(spec, where).with_spec(spec, {}).run_spec() == spec


def test_config_json_has_the_hosts(script: str, tmp_path: Path) -> None:
    spec = RunSpec(target=script, num_workers=2, hosts=HOSTS, given=frozenset({"hostfile"}))
    found = configuration(spec, {"PACELINE_ENCRYPT": "always"}, tmp_path, tmp_path)
    assert (found["hosts"].value, found["hosts"].origin) == (["a:4", "b:4"], "command line")
    assert found["encrypt"].value == "always"
    assert found["encrypt"].origin == "environment PACELINE_ENCRYPT"
    plain = RunSpec(target=script, num_workers=2, hosts=HOSTS, encrypt=False)
    found = configuration(plain, {}, tmp_path, tmp_path)
    assert (found["encrypt"].value, found["encrypt"].origin) == ("off", "command line")
    alone = configuration(RunSpec(target=script, num_workers=2), {}, tmp_path, tmp_path)
    assert "hosts" not in alone


# -- the command line ---------------------------------------------------------------------------


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["run", *words])
    assert isinstance(end.value.code, int)
    return end.value.code


def test_a_dry_run_prints_where_every_process_runs(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("hosts").write_text("a slots=2\nbob@b:2222 slots=2\n")
    options = ["-s", "2", "--servers-on", "b", "--no-encrypt", "--activate", ". v", "--sync"]
    assert run("--hostfile", "hosts", *options, "--dry-run", script) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:6] == [
        "host a (2 slots): ranks 0-1",
        "host b (2 slots): ranks 2-3 and servers 0-1",
        "python on other hosts: python",
        "before it, in the shell of each other host: . v",
        "the project is copied to the other hosts",
        "connections between hosts are NOT encrypted",
    ]
    assert "[3] on host b:" in lines and f"[3] python {script}" in lines
    assert "[3]     PACELINE_BIND=<address of b>" in lines
    assert "[3]     MASTER_ADDR=<address of a>" in lines
    assert "[3]     OMP_NUM_THREADS=<cores of b / 2>" in lines
    assert "[s1] on host b:" in lines
    assert not any(" PATH=" in line for line in lines)


def test_the_mesh_wins_over_the_slots(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--hosts", "a:4,b:4", "--mesh", "dp=2,tp=2", "--dry-run", script) == 0
    assert capsys.readouterr().out.startswith("host a (4 slots): ranks 0-3\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hosts", "a:0"], "--hosts a:0: 'a:0': expected a number of slots from 1"),
        (["--hosts", "a,a"], "host a is there twice"),
        (["--hosts", "a:2", "-n", "3"], "-n 3: the hosts have 2 slots (a:2); give -n 2"),
        (["--hosts", "a", "--hostfile", "f"], "--hosts and --hostfile both name the hosts"),
        (["--hostfile", "missing"], "--hostfile missing: No such file or directory"),
        (["--hosts", "a", "-s", "1", "--servers-on", "b"], "'b' is not in the list of hosts"),
        (["--sync"], "--sync without hosts"),
        (["--hosts", ""], "a host is missing"),
    ],
)
def test_a_wrong_command_line_ends_with_code_2(
    script: str, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert run(*options, "--dry-run", script) == 2
    error = capsys.readouterr().err
    assert error.startswith("paceline: error: ") and error.count("\n") == 1
    assert words in error
