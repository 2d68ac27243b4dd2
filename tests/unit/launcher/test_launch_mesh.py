"""`--mesh`: its product is the number of workers, and all processes are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import paceline as pl
from paceline.cli.main import _exit_code
from paceline.errors import ConfigError, UsageError
from paceline.launcher.environment import JobAddresses, process_environ
from paceline.launcher.function.checks import checked
from paceline.launcher.job_registry import facts_of
from paceline.launcher.job_size import plan_servers
from paceline.launcher.spec import RunSpec
from paceline.runtime.mesh import Mesh

_WHERE = JobAddresses(job_id="j", coordinator="127.0.0.1:9", secret_file="/s", master_port=1)


def _spec(tmp_path: Path, num_workers: int = 4, **more: Any) -> RunSpec:
    (tmp_path / "s.py").touch()
    return RunSpec(target=str(tmp_path / "s.py"), num_workers=num_workers, **more)


def test_the_mesh_goes_to_workers_and_servers_and_wins(tmp_path: Path) -> None:
    servers = plan_servers("1", num_workers=4)
    spec = _spec(tmp_path, mesh=Mesh.parse("dp=2,tp=2"), servers=servers)
    base = {"PACELINE_MESH": "pp=4"}
    environs = [process_environ(base, spec, name, _WHERE, cores=8) for name in spec.process_names]
    assert [environ["PACELINE_MESH"] for environ in environs] == 5 * ["dp=2,tp=2"]
    worker = process_environ(base, _spec(tmp_path), spec.process_names[0], _WHERE, cores=8)
    assert worker["PACELINE_MESH"] == "pp=4"
    alone = process_environ({}, _spec(tmp_path), spec.process_names[0], _WHERE, cores=8)
    assert "PACELINE_MESH" not in alone


def test_a_mesh_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError,
        match="--mesh dp=2,tp=2: dp 2 x tp 2 = 4, but this job has 3 workers; start it with -n 4",
    ):
        _spec(tmp_path, 3, mesh=Mesh.parse("dp=2,tp=2"))
    with pytest.raises(ConfigError, match="PACELINE_MESH: mesh tp=2: tp 2 = 2, but this job has 4"):
        _spec(tmp_path).mesh_in({"PACELINE_MESH": "tp=2"})
    with pytest.raises(ConfigError, match="PACELINE_MESH: mesh 'tp:4': 'tp:4' is not an axis"):
        _spec(tmp_path, env={"PACELINE_MESH": "tp:4"}).mesh_in({})
    with pytest.raises(ConfigError, match="give only one of them"):
        _spec(tmp_path, mesh=Mesh(tp=4), env={"PACELINE_MESH": "tp=4"})


def test_the_number_of_workers_follows_the_mesh(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = _spec(tmp_path).target
    assert _exit_code(["run", "--mesh", "dp=2,pp=2", "--dry-run", script]) == 0
    told = capsys.readouterr().out
    assert told.count("PACELINE_MESH=dp=2,pp=2") == told.count("PACELINE_WORLD_SIZE=4") == 4
    assert "mesh: dp=2,pp=2, which overrides the script's" in told
    assert _exit_code(["run", "-n", "2", "--mesh", "dp=2,pp=2", script]) == 2
    assert "dp 2 x pp 2 = 4, but this job has 2 workers" in capsys.readouterr().err


def test_what_is_written_down_of_a_job_has_its_mesh(tmp_path: Path) -> None:
    spec = _spec(tmp_path, mesh=Mesh.parse("dp=2,tp=2"))
    facts = facts_of(spec, _WHERE).with_spec(spec, {})
    read = msgspec.json.decode(msgspec.json.encode(facts), type=type(facts))
    assert read.run_spec().mesh == spec.mesh


def test_launch_follows_the_mesh() -> None:
    def plan(workers: int | None, mesh: str | None) -> tuple[int, Mesh | None]:
        made = checked(print, workers, 0, 0, None, mesh, None, 1, None)
        return made.num_workers, made.mesh

    assert plan(None, None) == (2, None)
    assert plan(None, "pp=3") == (3, Mesh(pp=3))
    with pytest.raises(UsageError, match="launch: mesh pp=3: pp 3 = 3, but this job has 2 workers"):
        pl.launch(print, workers=2, mesh="pp=3")
