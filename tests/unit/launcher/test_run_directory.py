"""Where a run is kept, and what is written down about how it was asked for."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.launcher.job_size import ElasticPlan
from paceline.launcher.run_configuration import configuration, encode, git_commit
from paceline.launcher.run_directory import run_directory
from paceline.launcher.spec import RunSpec
from paceline.pace.parse import parse_schedule

JOB_ID = "3f2a00112233"


def spec(**more) -> RunSpec:
    return RunSpec(**{"target": __file__, "num_workers": 2, **more})


def test_the_option_wins_over_the_environment_and_that_over_the_default():
    exported = {"PACELINE_LOG_DIR": "/exported"}
    assert run_directory(spec(log_dir=Path("a/b")), exported, JOB_ID) == Path("a/b")
    assert run_directory(spec(), exported, JOB_ID) == Path("/exported")
    default = run_directory(spec(), {"PACELINE_LOG_DIR": ""}, JOB_ID)
    assert re.fullmatch(r"runs/\d{8}-\d{6}-test_run_directory-3f2a", str(default))


def test_none_keeps_nothing_but_a_directory_may_have_that_name():
    off = {"PACELINE_LOG_DIR": "none"}
    assert run_directory(spec(), off, JOB_ID) is None
    assert run_directory(spec(log_dir=Path("none")), {}, JOB_ID) is None
    assert run_directory(spec(log_dir=Path("none")), {"PACELINE_LOG_DIR": "/x"}, JOB_ID) is None
    assert run_directory(spec(log_dir=Path("x")), off, JOB_ID) == Path("x")
    assert run_directory(spec(log_dir=Path("/tmp/none")), off, JOB_ID) == Path("/tmp/none")


def test_a_detached_job_has_a_directory_whatever_is_exported():
    plan = ElasticPlan(min_workers=2, max_workers=2)
    detached = spec(is_detached=True, elastic=plan)
    found = run_directory(detached, {"PACELINE_LOG_DIR": "none"}, JOB_ID)
    assert found is not None and found.parent == Path("runs")
    with pytest.raises(ConfigError, match="--log-dir none with --detach"):
        run_directory(spec(is_detached=True, elastic=plan, log_dir=Path("none")), {}, JOB_ID)


def test_names_are_safe_and_short(tmp_path: Path):
    script = tmp_path / ("a b\n<script>" + "x" * 200 + ".py")
    script.touch()
    name = run_directory(spec(target=str(script)), {}, JOB_ID).name
    assert re.fullmatch(r"[\w.+-]+", name) and len(name) < 130 and name.endswith("-3f2a")


def test_every_setting_says_where_it_came_from(tmp_path: Path):
    asked = spec(
        pace=parse_schedule("allreduce"),
        env={"PACELINE_WARN_S": "7", "TOKEN": "hidden"},
        arguments=("--lr", "0.1"),
        given=frozenset({"num_workers", "pace", "env"}),
    )
    environ = {
        "PACELINE_PRECISION": "bf16",
        "PACELINE_TIMEOUT_S": "60",
        "OMP_NUM_THREADS": "3",
        "PACELINE_LOG_DIR": "somewhere",
        "AWS_SECRET": "hidden",
    }
    text = encode(configuration(asked, environ, tmp_path, tmp_path)).decode()
    found = {name: (one["value"], one["origin"]) for name, one in json.loads(text).items()}
    assert found["workers"] == (2, "command line")
    assert found["servers"] == (0, "default")
    assert found["pace"] == ("allreduce", "command line")
    assert found["precision"] == ("bf16", "environment PACELINE_PRECISION")
    assert found["mesh"] == (None, "script")
    assert found["trace"] == (None, "default")
    assert found["threads_per_worker"] == ("3", "environment OMP_NUM_THREADS")
    assert found["timeout_s"] == (60.0, "environment PACELINE_TIMEOUT_S")
    assert found["warn_s"] == (7.0, "command line")
    assert found["liveness_s"][1] == "default"
    assert found["log_dir"] == (str(tmp_path), "environment PACELINE_LOG_DIR")
    assert found["arguments"] == (["--lr", "0.1"], "command line")
    assert found["env"] == (["PACELINE_WARN_S", "TOKEN"], "command line")
    assert re.match(r"\d+\.\d+", found["torch_version"][0])
    assert "hidden" not in text


def test_options_of_elastic_jobs_are_listed(tmp_path: Path):
    plan = ElasticPlan(min_workers=1, max_workers=4, restarts=2)
    asked = spec(elastic=plan, given=frozenset({"min_workers", "restarts"}))
    found = configuration(asked, {}, tmp_path, tmp_path)
    assert (found["min_workers"].value, found["min_workers"].origin) == (1, "command line")
    assert (found["restarts"].value, found["max_workers"].origin) == (2, "default")


def test_the_commit_is_that_of_git(tmp_path: Path):
    assert git_commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert git_commit(tmp_path) is None, "nothing was committed yet"
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    told = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    assert git_commit(tmp_path / "deep" / "er") == told.stdout.strip()
    subprocess.run([*git, "pack-refs", "--all"], check=True)
    assert git_commit(tmp_path) == told.stdout.strip()
    subprocess.run([*git, "worktree", "add", "-q", str(tmp_path / "tree")], check=True)
    assert git_commit(tmp_path / "tree") == told.stdout.strip()
    subprocess.run([*git, "checkout", "-q", "--detach"], check=True)
    assert git_commit(tmp_path) == told.stdout.strip()
