"""Servers in the launcher's values: names, plans, environments, board rows, reports, results."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError, UsageError
from paceline.launcher.environment import JobAddresses, process_environ
from paceline.launcher.function.plain_values import pack, unpack
from paceline.launcher.job_size import ServerPlan, plan_servers
from paceline.launcher.outcome import JobOutcome, failure_report
from paceline.launcher.processes.process import ExitStatus
from paceline.launcher.processes.table import ProcessResult, first_cause
from paceline.launcher.spec import RunSpec
from paceline.observe.display.board import Board
from paceline.observe.telemetry.events import ProgressReport
from paceline.pace.parse import parse_schedule
from paceline.runtime.config import job_env
from paceline.runtime.machine import MemoryInfo, OomCount
from paceline.runtime.process_names import counted, names, process_names

_WHERE = JobAddresses(job_id="j", coordinator="127.0.0.1:9", secret_file="f", master_port=1)


def test_servers_sit_behind_the_workers() -> None:
    job = process_names(2, 2)
    assert [name.rank for name in job] == [0, 1, 2, 3]
    assert [name.label for name in job] == ["0", "1", "s0", "s1"]
    assert [name.log_name for name in job[1:3]] == ["rank-1.log", "server-0.log"]
    assert str(job[1]) == "rank 1" and str(job[3]) == "server 1"
    assert names(job) == "ranks 0-1 and servers 0-1" and names(job[2:3]) == "server 0"
    assert counted(1, 0) == "1 rank" and counted(2, 1) == "2 ranks and 1 server"


def test_a_count_or_colocated() -> None:
    assert plan_servers("2", num_workers=3).count == 2
    beside = plan_servers("colocated", num_workers=3)
    assert beside.count == 3 and beside.is_colocated
    assert plan_servers("0", num_workers=3, replicas=1).count == 0


@pytest.mark.parametrize(
    ("text", "more", "words"),
    [
        ("-1", {}, "-s -1: expected a number from 0 to 1024"),
        ("5000", {}, "-s 5000: expected a number"),
        ("two", {}, "-s two: expected a number or colocated"),
        ("1.5", {}, "-s 1.5: expected a number or colocated"),
        ("", {}, "expected a number or colocated"),
        ("1", {"replicas": 2}, "replicas 2 > servers 1: .* give -s 2, or fewer --replicas"),
        ("0", {"replicas": 2}, "replicas 2 > servers 0: "),
        ("2", {"replicas": 0}, "--replicas 0: expected a number of at least 1"),
        ("1", {"threads": 0}, "--threads-per-server 0"),
        ("0", {"threads": 2}, "--threads-per-server without servers: add -s 1"),
    ],
)
def test_plans_that_make_no_sense_are_refused(text: str, more: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_servers(text, num_workers=2, **more)


def test_a_pace_gets_the_servers_it_needs_and_no_others() -> None:
    ServerPlan(count=2).check_pace(None)
    ServerPlan().check_pace(None)
    ServerPlan().check_pace(parse_schedule("allreduce"))
    for text in ("ps", "async", "ssp:3"):
        ServerPlan(count=1).check_pace(parse_schedule(text))
        with pytest.raises(ConfigError, match=f"pace {text} needs parameter servers: add -s 1"):
            ServerPlan().check_pace(parse_schedule(text))
    for text in ("local:8", "post_local", "bmuf", "diloco:50", "easgd", "eamsgd"):  # both ways
        ServerPlan(count=1).check_pace(parse_schedule(text))
        ServerPlan().check_pace(parse_schedule(text))
    with pytest.raises(ConfigError, match="mode=async.* needs parameter servers: add -s 1"):
        ServerPlan().check_pace(parse_schedule("eamsgd[mode=async]"))
    with pytest.raises(ConfigError, match=r"gossip:ring uses no parameter servers \(.* no centre"):
        ServerPlan(count=1).check_pace(parse_schedule("gossip:ring"))
    with pytest.raises(ConfigError, match="allreduce uses no parameter servers: leave out -s 2"):
        ServerPlan(count=2).check_pace(parse_schedule("allreduce"))
    with pytest.raises(ConfigError, match="leave out -s colocated"):
        plan_servers("colocated", num_workers=1).check_pace(parse_schedule("allreduce"))


def _spec(tmp_path: Path, **more: Any) -> RunSpec:
    (tmp_path / "s.py").touch()
    plan = plan_servers("3", num_workers=2, threads=more.pop("server_threads", None))
    return RunSpec(target=str(tmp_path / "s.py"), num_workers=2, servers=plan, **more)


def test_the_pace_in_the_environment_is_held_against_the_servers(tmp_path: Path) -> None:
    spec = _spec(tmp_path)
    assert str(spec.pace_in({"PACELINE_PACE": "ssp:3"})) == "ssp:3"
    with pytest.raises(ConfigError, match="PACELINE_PACE: pace allreduce uses no parameter serv"):
        spec.pace_in({"PACELINE_PACE": "allreduce"})
    with pytest.raises(ConfigError, match="needs parameter servers"):
        RunSpec(target=spec.target, num_workers=2, pace=parse_schedule("ps"))


def test_the_precision_goes_to_workers_and_wins(tmp_path: Path) -> None:
    spec = _spec(tmp_path, precision="bf16")
    base = {"PACELINE_PRECISION": "fp16"}
    environs = [process_environ(base, spec, name, _WHERE, cores=8) for name in spec.process_names]
    assert [environ.get("PACELINE_PRECISION") for environ in environs] == ["bf16", "bf16"] + 3 * [
        None
    ]
    worker = process_environ(base, _spec(tmp_path), spec.process_names[0], _WHERE, cores=8)
    assert worker["PACELINE_PRECISION"] == "fp16"
    with pytest.raises(
        UsageError, match=r"'BF61' is unknown \(did you mean bf16\?\); choose fp32,"
    ):
        _spec(tmp_path, precision="BF61")
    with pytest.raises(
        ConfigError, match="PACELINE_PRECISION: precision 'half' is unknown; choose"
    ):
        _spec(tmp_path).precision_in({"PACELINE_PRECISION": "half"})
    with pytest.raises(ConfigError, match="give only one of them"):
        _spec(tmp_path, precision="bf16", env={"PACELINE_PRECISION": "bf16"})


def test_a_server_is_told_who_it_is_and_nothing_in_torchruns_words(tmp_path: Path) -> None:
    env = {"LR": "1", "PACELINE_JOIN_TIMEOUT_S": "9"}
    spec = _spec(tmp_path, pace=parse_schedule("ssp:3"), env=env)
    base = {"HOME": "/h", "OMP_NUM_THREADS": "7", "RANK": "9", "MASTER_ADDR": "x"}
    environs = [process_environ(base, spec, name, _WHERE, cores=8) for name in spec.process_names]
    server = environs[4]
    assert {"RANK", "WORLD_SIZE", "MASTER_ADDR", "PACELINE_PACE"}.isdisjoint(server)
    assert not any(name.startswith("TORCHELASTIC") for name in server)
    assert (server["OMP_NUM_THREADS"], server["LR"], server["HOME"]) == ("2", "1", "/h")
    env = job_env(server)
    assert (env.role, env.rank, env.world_size, env.num_servers) == ("server", 4, 2, 3)
    assert environs[1]["PACELINE_SERVERS"] == "3" and environs[1]["PACELINE_PACE"] == "ssp:3"
    assert environs[1]["OMP_NUM_THREADS"] == "7" and job_env(environs[1]).role == "worker"
    assert environs[1]["PACELINE_JOIN_TIMEOUT_S"] == "9" != server["PACELINE_JOIN_TIMEOUT_S"]
    assert spec.command(spec.process_names[4]).argv[1:] == ["-m", "paceline.runtime.server_main"]


def test_threads_of_servers_are_their_own(tmp_path: Path) -> None:
    spec = _spec(tmp_path, threads_per_worker=3, server_threads=2)
    environs = [process_environ({}, spec, name, _WHERE, cores=8) for name in spec.process_names]
    assert [environ["OMP_NUM_THREADS"] for environ in environs] == ["3", "3", "2", "2", "2"]


def test_without_servers_nothing_is_said_of_them(tmp_path: Path) -> None:
    (tmp_path / "s.py").touch()
    spec = RunSpec(target=str(tmp_path / "s.py"), num_workers=2)
    environ = process_environ(
        {"PACELINE_SERVERS": "4"}, spec, spec.process_names[0], _WHERE, cores=1
    )
    assert "PACELINE_SERVERS" not in environ


def test_a_server_has_a_row_when_it_reports() -> None:
    board = Board(process_names(2, 2))
    board.on_event(ProgressReport(3, 40, {"version": 40.0}), 0.0)
    assert board.has_progress and board.line(0.0) == "0 of 2 ranks reporting"
    board.on_event(ProgressReport(0, 7, {"loss": 0.5}), 0.0)
    assert [row.label for row in board.rows(0.0)] == ["0", "1", "s1"]
    assert board.rows(0.0)[-1].values == {"version": 40.0}
    assert board.line(0.0) == "step 7, loss 0.5, 1 of 2 ranks reporting"


_LOST = [
    "Traceback (most recent call last):",
    "paceline.errors.ServerLost: server 0 (host:7) ended; it held 3 shards",
]


def _result(rank: int, **more: Any) -> ProcessResult:
    fields = {"pid": 100 + rank, "status": ExitStatus(1), "ran_s": 1.0, **more}
    return ProcessResult(name=process_names(2, 1)[rank], **fields)


def test_workers_that_lose_a_server_are_consequences() -> None:
    killed = _result(2, status=ExitStatus(None, signal.SIGKILL))
    results = [_result(0, stderr_tail=_LOST), _result(1, was_stopped=True), killed]
    assert first_cause([results[0], killed]) == killed
    report = failure_report(results, killed, why_killed=None).splitlines()
    assert report[0].startswith("paceline: server 0 failed first: killed by SIGKILL")
    assert report[0].endswith("(pid 102)")
    assert "rank 0: stopped because server 0 failed (paceline.errors.ServerLost" in report[2]
    assert report[3] == "paceline: rank 1: stopped because server 0 failed"


def test_the_bad_end_of_a_server_after_the_workers_is_said_but_no_failure() -> None:
    late = _result(2, ended_last=True)
    assert not late.has_failed
    nothing = OomCount(0, 0)
    outcome = JobOutcome(
        results=[_result(0, status=ExitStatus(0)), _result(1, status=ExitStatus(0)), late],
        first=None,
        interrupted_by=None,
        wall_s=1.0,
        oom_before=nothing,
        oom_after=nothing,
        memory=MemoryInfo(total_bytes=1, available_bytes=1, limit_bytes=None, peak_bytes=None),
    )
    assert outcome.exit_code == 0
    words = "paceline: server 0: exit code 1 after the last worker had ended (pid 102)"
    assert outcome.late_failures() == [words]
    assert outcome.closing_line() == "paceline: 2 ranks and 1 server finished in 1.0 s"


class _Half(float):
    """As numpy's float64: a float of another type."""


def test_plain_results_come_back_as_they_were() -> None:
    value = {"a": [1, -2.5, None, True, "x", b"\0"], 7: {"b": []}, b"k": (1 << 64) - 1}
    assert unpack(pack(value)) == value
    assert unpack(pack((1, (2, 3)))) == [1, [2, 3]]
    assert type(unpack(pack(_Half(0.5)))) is float


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [1, {2}]}, r"the result\['a'\]\[1\] is a builtins.set; a launched function can"),
        (object(), "the result is a builtins.object"),
        (memoryview(b"x"), "builtins.memoryview; .* use .tolist"),
        ({(1, 2): 3}, "key .1, 2. .tuple."),
        ({True: 3}, "key True"),
        (1 << 64, "more than 64 bits"),
    ],
)
def test_other_results_are_refused_by_name(value: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        pack(value)


def test_a_result_within_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="within itself"):
        pack(loop)
