"""What ranks print, and what they are told through their environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from run_support import COMMAND, END_S, Workbench


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path)


def test_lines_carry_the_rank_and_keep_their_stream(bench: Workbench) -> None:
    script = bench.script("""
        import os, sys
        print("out", os.environ["RANK"])
        print("err", os.environ["RANK"], file=sys.stderr)
        sys.stdout.write("no newline at the end")
    """)
    done = bench.run("run", "-n", "2", script)
    assert done.returncode == 0
    out = ["[0] no newline at the end", "[0] out 0", "[1] no newline at the end", "[1] out 1"]
    assert sorted(done.stdout.splitlines()) == out
    assert sorted(done.stderr.splitlines()) == ["[0] err 0", "[1] err 1"]
    assert bench.left_behind() == []


def test_success_without_progress_is_quiet(bench: Workbench) -> None:
    done = bench.run("run", "-n", "3", bench.script("pass"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_everything_after_the_script_belongs_to_it(bench: Workbench) -> None:
    script = bench.script("import json, sys; print(json.dumps(sys.argv[1:]))")
    given = ["-n", "7", "--env", "x", "--", "--dry-run", "-m", "a b", "$(id);'\"", "--help", ""]
    done = bench.run("run", script, *given)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.removeprefix("[0] ")) == given


def test_modules_run_with_their_own_options(bench: Workbench) -> None:
    bench.script("import sys; print(__name__, sys.argv[1:])", "worker.py")
    done = bench.run("run", "-n", "1", "-m", "worker", "-n", "3", "--version")
    assert done.stdout == "[0] __main__ ['-n', '3', '--version']\n"


def test_binary_and_very_long_lines_survive(bench: Workbench) -> None:
    script = bench.script(r"""
        import sys
        sys.stdout.buffer.write(b"\x00\xff\x1b[2Jbell\x07\n" + b"x" * 3_000_000 + b"\nafter\n")
    """)
    done = bench.run("run", "--log-dir", "logs", script)
    assert done.returncode == 0, done.stderr
    binary, long, after = done.stdout.splitlines()
    assert binary == r"[0] \x00\xff\x1b[2Jbell\x07"
    assert len(long) < 20_000 and "line of 3000000 bytes cut here" in long
    assert after == "[0] after"
    log = (bench.path / "logs" / "rank-0.log").read_bytes()
    assert log == b"\x00\xff\x1b[2Jbell\x07\n" + b"x" * 3_000_000 + b"\nafter\n"


def test_each_rank_has_a_log_with_both_streams(bench: Workbench) -> None:
    script = bench.script("""
        import os, sys
        print("out", os.environ["RANK"], flush=True)
        print("err", os.environ["RANK"], file=sys.stderr)
    """)
    assert bench.run("run", "-n", "2", "--log-dir", "deep/logs", script).returncode == 0
    for rank in range(2):
        text = (bench.path / f"deep/logs/rank-{rank}.log").read_text()
        assert sorted(text.splitlines()) == [f"err {rank}", f"out {rank}"]


def test_a_reader_that_goes_away_does_not_end_the_job(bench: Workbench) -> None:
    script = bench.script("""
        import pathlib
        for i in range(2000): print("line", i)
        pathlib.Path("finished").write_text("yes")
    """)
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [*COMMAND, "run", script],
        cwd=bench.path,
        env=bench.environ,
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        timeout=END_S,
        check=False,
    )
    os.close(write_end)
    assert done.returncode == 0
    assert "the job continues without it" in done.stderr
    assert (bench.path / "finished").exists()


_PRINT_ENVIRON = "import json, os; print(json.dumps(dict(os.environ)))"


def _environs(bench: Workbench, *options: str, **env: str) -> dict[int, dict[str, str]]:
    done = bench.run("run", *options, bench.script(_PRINT_ENVIRON), **env)
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    return {int(prefix.strip("[]")): json.loads(text) for prefix, text in lines}


def test_ranks_see_our_variables_and_torchruns(bench: Workbench) -> None:
    environs = _environs(bench, "-n", "2", "--threads-per-worker", "3", "--env", "LR=0.1=x")
    for rank, environ in environs.items():
        for prefix in ("", "PACELINE_"):
            assert environ[prefix + "RANK"] == environ[prefix + "LOCAL_RANK"] == str(rank)
            assert environ[prefix + "WORLD_SIZE"] == environ[prefix + "LOCAL_WORLD_SIZE"] == "2"
        assert environ["OMP_NUM_THREADS"] == "3"
        assert environ["LR"] == "0.1=x"
        assert environ["MASTER_ADDR"] == "127.0.0.1"
        assert environ["TORCHELASTIC_RUN_ID"] == environ["PACELINE_JOB"]
    same = ("PACELINE_JOB", "PACELINE_COORDINATOR", "PACELINE_SECRET_FILE", "MASTER_PORT")
    assert all(environs[0][name] == environs[1][name] for name in same)


def test_every_rank_is_told_the_pace(bench: Workbench) -> None:
    wanted = "allreduce[update=sharded]"
    environs = _environs(bench, "-n", "2", "--pace", "allreduce[ update=sharded ]")
    assert [environs[rank]["PACELINE_PACE"] for rank in range(2)] == [wanted] * 2
    assert _environs(bench, PACELINE_PACE=wanted)[0]["PACELINE_PACE"] == wanted
    both = _environs(bench, "--pace", wanted, PACELINE_PACE="allreduce")
    assert both[0]["PACELINE_PACE"] == wanted, "the option wins over what was exported"
    assert "PACELINE_PACE" not in _environs(bench)[0]
    shown = bench.run("run", "--dry-run", "--pace", wanted, bench.script("pass")).stdout
    assert f"[0]     PACELINE_PACE='{wanted}'" in shown.splitlines()
    assert f"pace: {wanted}, which overrides the script's" in shown.splitlines()


@pytest.mark.parametrize(
    ("options", "env", "words"),
    [
        (["--pace", "alreduce"], {}, "pace 'alreduce': .*did you mean allreduce"),
        (["--pace", "ssp:3", "--dry-run"], {}, "pace ssp:3 needs parameter servers: add -s 1"),
        (["--env", "PACELINE_PACE=x"], {}, "PACELINE_PACE: pace 'x'"),
        ([], {"PACELINE_PACE": "x"}, "PACELINE_PACE: pace 'x'"),
        (["--dry-run"], {"PACELINE_PACE": "x"}, "PACELINE_PACE: pace 'x'"),
    ],
)
def test_a_wrong_pace_starts_nothing(
    bench: Workbench, options: list[str], env: dict[str, str], words: str
) -> None:
    script = bench.script("open('started', 'w')")
    done = bench.run("run", *options, script, **env)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"paceline: error: .*{words}.*\n", done.stderr), done.stderr
    assert not (bench.path / "started").exists() and bench.left_behind() == []


def test_what_other_launchers_left_is_not_passed_on(bench: Workbench) -> None:
    foreign = {"SLURM_PROCID": "5", "OMPI_COMM_WORLD_RANK": "6", "PMI_RANK": "7", "RANK": "8"}
    environ = _environs(bench, **foreign, WORLD_SIZE="9", SLURM_JOB_ID="77", OMP_NUM_THREADS="5")[0]
    assert {"SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}.isdisjoint(environ)
    assert (environ["RANK"], environ["WORLD_SIZE"], environ["SLURM_JOB_ID"]) == ("0", "1", "77")
    assert environ["OMP_NUM_THREADS"] == "5", "what the user exported is respected"


def test_the_secret_is_private_and_in_no_command_line(bench: Workbench) -> None:
    script = bench.script("""
        import os, pathlib, stat
        file = pathlib.Path(os.environ["PACELINE_SECRET_FILE"])
        secret = file.read_text().strip()
        print(oct(stat.S_IMODE(file.stat().st_mode)), oct(stat.S_IMODE(file.parent.stat().st_mode)))
        pids = [p for p in pathlib.Path("/proc").iterdir() if p.name.isdigit()]
        seen = 0
        for pid in pids:
            try:
                seen += secret in (pid / "cmdline").read_text(errors="replace")
            except OSError:
                pass
        print(len(secret), seen, secret in str(dict(os.environ)))
    """)
    done = bench.run("run", script)
    assert done.stdout.splitlines() == ["[0] 0o600 0o700", "[0] 64 0 False"]
    assert bench.left_behind() == []


def test_dry_run_starts_nothing(bench: Workbench) -> None:
    script = bench.script("import pathlib; pathlib.Path('ran').touch()")
    done = bench.run("run", "-n", "2", "--dry-run", "--env", "A=b c", script, "x y")
    assert done.returncode == 0
    assert f"{script} 'x y'" in done.stdout
    assert "[1]     PACELINE_RANK=1" in done.stdout and "[1]     A='b c'" in done.stdout
    assert not (bench.path / "ran").exists()


def test_two_jobs_at_once_do_not_meet(bench: Workbench) -> None:
    script = bench.script("""
        import os, pathlib, sys, time
        me, other = sys.argv[1:]
        names = "MASTER_PORT", "PACELINE_COORDINATOR", "PACELINE_JOB", "PACELINE_SECRET_FILE"
        pathlib.Path(me).write_text(" ".join(os.environ[name] for name in names) + "\\n")
        while not pathlib.Path(other).exists(): time.sleep(0.01)
    """)
    with (
        bench.started("run", script, "a", "b") as one,
        bench.started("run", script, "b", "a") as two,
    ):
        assert one.wait(END_S) == 0 and two.wait(END_S) == 0
    first, second = (text.split() for text in bench.wait_for_files("a", "b"))
    assert set(first).isdisjoint(second)
