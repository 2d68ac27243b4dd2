"""The bounds of an elastic job: what follows from which options, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError, UsageError
from paceline.launcher.environment import JobAddresses, process_environ
from paceline.launcher.job_size import ServerPlan, plan_changes
from paceline.launcher.spec import RunSpec
from paceline.runtime.config import job_env
from paceline.runtime.mesh import Mesh
from paceline.runtime.process_names import ProcessName

_WHERE = JobAddresses(job_id="j", coordinator="127.0.0.1:9", secret_file="f", master_port=1)


def test_without_an_option_nothing_changes() -> None:
    assert plan_changes(num_workers=4, servers=ServerPlan(count=2)) is None


@pytest.mark.parametrize(
    "options",
    [
        {"min_workers": 2},
        {"max_workers": 4},
        {"on_loss": "shrink"},
        {"restarts": 2},
        {"is_detached": True},
    ],
)
def test_any_option_makes_a_job_elastic_and_leaves_the_others_at_n(options: dict[str, Any]) -> None:
    plan = plan_changes(num_workers=4, servers=ServerPlan(), **options)
    assert plan is not None and plan.on_loss == "shrink"
    assert plan.min_workers == options.get("min_workers", 4) and plan.max_workers == 4
    assert plan.num_partitions(ServerPlan()) == 0


def test_tables_are_cut_for_as_many_servers_as_there_may_be() -> None:
    for max_servers, partitions in ((None, 4), (3, 4), (7, 7)):
        servers = ServerPlan(count=2, replicas=2)
        plan = plan_changes(num_workers=1, servers=servers, max_servers=max_servers)
        assert plan is not None and plan.num_partitions(servers) == partitions
        assert plan.max_servers == (max_servers or 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_workers": 0}, "--min 0: a job needs at least 1 worker"),
        ({"min_workers": 5}, "--min 5 > -n 4: .* give -n 5, or a smaller --min"),
        ({"max_workers": 3}, "--max 3 < -n 4: .* give -n 3, or a larger --max"),
        ({"max_workers": 5000}, "--max 5000: expected at most 1024"),
        ({"restarts": -1}, "--restarts -1: expected a number from 0 to"),
        ({"on_loss": "cry"}, "--on-loss cry: expected shrink .* or replace"),
        ({"max_servers": 2}, "--max-servers 2 without servers: add -s 1"),
        ({"max_servers": 1, "servers": ServerPlan(count=2)}, "--max-servers 1 < -s 2: "),
        ({"max_servers": 5000, "servers": ServerPlan(count=2)}, "--max-servers 5000: expected"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_changes(**{"num_workers": 4, "servers": ServerPlan(), **options})


def test_a_newcomer_reads_its_own_environment(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    servers = ServerPlan(count=2, replicas=2)
    spec = RunSpec(
        target=str(script),
        num_workers=3,
        servers=servers,
        elastic=plan_changes(num_workers=3, servers=servers, on_loss="replace"),
    )
    worker = ProcessName(17, 4, is_newcomer=True)
    env = job_env(process_environ({}, spec, worker, _WHERE, cores=2))
    assert (env.rank, env.number, env.world_size, env.role) == (17, 4, 3, "worker")
    assert env.is_newcomer and env.is_elastic and env.on_loss == "replace"
    assert (env.num_partitions, env.replicas, env.num_servers) == (4, 2, 2)
    server = ProcessName(18, 1, is_server=True, is_newcomer=True)
    env = job_env(process_environ({}, spec, server, _WHERE, cores=2))
    assert (env.rank, env.number, env.role, env.is_newcomer) == (18, 1, "server", True)
    first = job_env(process_environ({}, spec, spec.process_names[4], _WHERE, cores=2))
    assert (first.rank, first.number, first.is_newcomer) == (4, 1, False)


def test_the_grace_is_checked(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    for wrong in (-1.0, 1e9, float("nan")):
        with pytest.raises(ConfigError, match="--grace"):
            RunSpec(target=str(script), num_workers=1, grace_s=wrong)


def test_with_a_mesh_bounds_are_of_whole_units() -> None:
    mesh = Mesh.parse("dp=2,tp=2")
    plan = plan_changes(num_workers=4, servers=ServerPlan(), min_workers=2, mesh=mesh)
    assert plan is not None and plan.max_workers == 4
    for options, words in (
        ({"min_workers": 1}, r"--min 1: .* units of tp 2 = 2, and 1 = 0 x 2 \+ 1; .* --min 2"),
        ({"max_workers": 7}, r"--max 7: .* units of tp 2 = 2, and 7 = 3 x 2 \+ 1; .* --max 8"),
    ):
        with pytest.raises(UsageError, match=words):
            plan_changes(num_workers=4, servers=ServerPlan(), mesh=mesh, **options)
