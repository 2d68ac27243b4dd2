"""`paceline hosts` for a job without a host list."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_support import END_S, Workbench


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path)


def test_a_job_without_a_host_list_refuses_hosts(bench: Workbench) -> None:
    script = bench.script("""
        import pathlib, time
        import paceline as pl
        pl.init()
        pathlib.Path("ready").write_text("1\\n")
        while not pathlib.Path("end").exists():
            time.sleep(0.02)
    """)
    with bench.started("run", "-n", "1", "--min", "1", script) as launcher:
        bench.wait_for_files("ready")
        listed, added = bench.run("hosts"), bench.run("hosts", "add", "c:4")
        wrong, zero = bench.run("hosts", "add"), bench.run("hosts", "add", "c:0")
        (bench.path / "end").touch()
        assert launcher.wait(END_S) == 0
    assert listed.returncode == 0, listed.stderr
    assert listed.stdout.startswith("the job has no host list")
    assert added.returncode == 2 and "hosts add c:4: the job has no host list" in added.stderr
    assert wrong.returncode == 2 and "for example `paceline hosts add c:4`" in wrong.stderr
    assert zero.returncode == 2 and "expected a number of slots from 1" in zero.stderr
    assert bench.left_behind() == []
