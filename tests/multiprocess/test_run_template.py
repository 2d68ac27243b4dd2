"""Processes of a job under `paceline run` are forked from one template."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from run_support import END_S, Workbench, is_alive, read_until


def _origin(pid: int) -> str:
    """Return where the kernel put a command's arguments: the same in all forks of one process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[45]


_WHENCE = """
    import sys
    had = "torch" in sys.modules
    import paceline as pl
    pl.init()
    arguments = open("/proc/self/stat").read().rpartition(")")[2].split()[45]
    print(had, hash("a word"), arguments)
    pl.world().barrier()
"""


@pytest.mark.parametrize("options", [(), ("--no-template",)])
def test_workers_of_a_job_come_from_one_template(
    tmp_path: Path, options: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Workbench(tmp_path)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    job.environ.pop("PYTHONHASHSEED", None)
    done = job.run("run", "-n", "2", *options, job.script(_WHENCE))
    assert done.returncode == 0, done.stderr
    one, two = [line.split()[1:] for line in sorted(done.stdout.splitlines())]
    if options:
        assert one[0] == two[0] == "False" and one[1] != two[1] and one[2] != two[2]
    else:
        assert one == two and one[0] == "True"
    assert job.left_behind() == []


def test_a_setting_forbids_the_template_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    job = Workbench(tmp_path)
    script = job.script("import sys\nprint('numpy' in sys.modules)\nimport numpy")
    done = job.run("run", "-n", "2", script, PACELINE_TEMPLATE="off")
    assert sorted(done.stdout.splitlines()) == ["[0] False", "[1] False"], done.stderr
    done = job.run("run", "-n", "2", script, PACELINE_TEMPLATE="no")
    assert done.returncode == 2 and "PACELINE_TEMPLATE='no': expected on or off" in done.stderr


_SERVED = """
    import pathlib, time
    import torch
    import paceline as pl
    job = pl.init()
    model = torch.nn.Linear(4, 2)
    model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
    while not pathlib.Path("finish").exists():
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
"""


def test_the_first_replacement_of_a_server_comes_from_the_template(tmp_path: Path) -> None:
    """Nothing may have to be imported while a partition has one copy less."""
    job = Workbench(tmp_path)
    options = ("-n", "1", "-s", "2", "--replicas", "2", "--pace", "ps", "--log-dir", "none")
    with job.started("run", *options, job.script(_SERVED)) as launcher:
        path = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")

        def servers() -> list[int]:
            found = [int(pid) for pid in path.read_text().split() if is_alive(pid)]
            words = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in found}
            return [pid for pid in found if "paceline.runtime.server_main" in words[pid]]

        read_until(launcher.stderr, "update on 2 servers")
        first, other = servers()
        os.kill(first, signal.SIGKILL)
        said = read_until(launcher.stderr, "lost: killed by signal 9")
        said += read_until(launcher.stderr, " joined")
        (second,) = {int(pid) for pid in re.findall(r"pid (\d+)\) joined", said)}
        assert _origin(second) == _origin(other)
        (job.path / "finish").touch()
        assert launcher.stderr is not None
        said += launcher.stderr.read()
        assert launcher.wait(END_S) == 0, said
    assert job.left_behind() == []
