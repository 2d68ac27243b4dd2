"""The launcher together with the engine: the demo, the doctor's self-test, a rank that is lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from run_support import Workbench

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path)


def test_the_demo_learns_and_its_ranks_agree(bench: Workbench) -> None:
    done = bench.run("run", "-n", "2", str(EXAMPLES / "digits_logistic.py"), "--steps", "60")
    assert done.returncode == 0, done.stderr
    accuracy = re.search(r"\[0\] test accuracy (\d\.\d+) on 360 images", done.stdout)
    assert accuracy is not None and float(accuracy[1]) > 0.9
    assert "[0] all 2 ranks hold the same weights, bit for bit" in done.stdout
    for rank in range(2):
        assert re.search(rf"^ +{rank} +60 .*finished$", done.stderr, re.M), done.stderr
    assert bench.left_behind() == []


def test_the_doctor_tries_the_engine(bench: Workbench) -> None:
    done = bench.run("doctor", "--run")
    assert done.returncode == 0, done.stdout
    assert "all_reduce: right" in done.stdout and "2 ranks          passed in" in done.stdout


def test_a_rank_that_raises_is_named_before_those_that_lost_it(bench: Workbench) -> None:
    script = bench.script("""
        import torch, paceline as pl
        pl.init()
        tensor = torch.ones(1000)
        for step in range(50):
            if step == 20 and pl.rank() == 1:
                raise RuntimeError("disk full on rank 1")
            pl.world().all_reduce(tensor, op="mean")
    """)
    done = bench.run("run", "-n", "2", script)
    assert done.returncode == 1
    assert "paceline: rank 1 failed first: exit code 1" in done.stderr, done.stderr
    assert "| RuntimeError: disk full on rank 1" in done.stderr
    assert "rank 0: stopped because rank 1 failed" in done.stderr


# Ranks 0 and 1 finish while rank 2 is forming the group of all, or before it opens a channel.
# `hold` stops a rank on its way into a function, at the moment that matters; nothing is replaced.
_FINISHED_EARLY = """
    import os, sys, time
    rank, has_hosts = int(os.environ["PACELINE_RANK"]), sys.argv[1] == "hosts"
    if rank == 2 and has_hosts:
        os.environ["PACELINE_HOST_ID"] = "another"
    import torch, paceline as pl

    def hold(function, caller, until):
        def at_call(frame, event, _):
            names = frame.f_code.co_name, frame.f_back and frame.f_back.f_code.co_name
            if event == "call" and names == (function, caller):
                sys.setprofile(None)
                open(function, "w").close()
                while not until(frame.f_locals["self"]):
                    time.sleep(0.01)
        sys.setprofile(at_call)

    def have_both_left(fabric):
        return [fabric.presence[r].state for r in (0, 1) if r in fabric.presence] == ["left"] * 2

    if rank == 0 and not has_hosts:  # makes the memory: rank 2 has looked in vain
        hold("_form", "create_group", lambda _: os.path.exists("_require_presence"))
    elif rank == 2 and not has_hosts:
        hold("_require_presence", "_form", have_both_left)
    pl.init()
    print(f"rank {rank} has joined")
    if rank == 2:
        from paceline.runtime import job
        while not have_both_left(job.current().fabric):  # it has no channel to them yet
            time.sleep(0.01)
        began_s = time.monotonic()
        try:
            pl.world().all_reduce(torch.ones(1))
        except pl.errors.PeerLost as error:
            print(f"alone now, noticed at once: {time.monotonic() - began_s < 5} ({error})")
"""


@pytest.mark.parametrize("where", ["host", "hosts"])
def test_ranks_that_have_finished_do_not_break_the_start_of_others(
    bench: Workbench, where: str
) -> None:
    done = bench.run("run", "-n", "3", bench.script(_FINISHED_EARLY), where)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank (\d) has joined", done.stdout)) == ["0", "1", "2"]
    if where == "host":
        assert (bench.path / "_require_presence").exists(), "the moment was met"
    assert "[2] alone now, noticed at once: True" in done.stdout
