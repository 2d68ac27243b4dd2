"""Newcomers from the template are like fresh interpreters, and the launcher's own children."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_support import is_alive, wait_until

from paceline.launcher.elastic.template import Template, adopt_orphans
from paceline.launcher.outlet import Outlet
from paceline.launcher.process import RankProcess
from paceline.launcher.seat import Seat
from paceline.launcher.spec import RunSpec

_ABOUT = """
import os, random, sys
print(__name__, sys.argv, os.path.basename(__file__), os.path.basename(sys.path[0]))
print(os.environ["COLOUR"], os.getsid(0) == os.getpid(), len(os.listdir("/proc/self/fd")))
import numpy, torch
print("drawn", numpy.random.rand(), random.random())
print("threads", torch.get_num_threads(), "torch was there" if "torch" in sys.modules else "")
"""


class _Bench:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.environ = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}

    async def warm(self) -> Template:
        template = Template(self.environ)
        deadline = time.monotonic() + 100
        while not await template.hurry():
            assert time.monotonic() < deadline
        return template

    def spec(self, text: str, *arguments: str) -> RunSpec:
        script = self.path / "script.py"
        script.write_text(text)
        return RunSpec(target=str(script), arguments=arguments, num_workers=1)

    async def run(
        self, template: Template, spec: RunSpec, **environ: str
    ) -> tuple[RankProcess, str, str]:
        outlet = Outlet.pipes()
        with (
            open(outlet.stdout_fd, closefd=False) as out,
            open(outlet.stderr_fd, closefd=False) as errors,
        ):
            environ = {**self.environ, **environ}
            process = await template.fork(Seat(0, 0), spec, environ, outlet, dies=True)
            assert process is not None
            while not process.check_ended():
                await asyncio.sleep(0.005)
            texts = out.read(), errors.read()
        process.release()
        return process, *texts


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[_Bench]:
    adopt_orphans()
    yield _Bench(tmp_path)
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: not for the other tests


def test_a_newcomer_is_like_a_fresh_interpreter(bench: _Bench) -> None:
    async def body() -> None:
        template = await bench.warm()
        try:
            spec = bench.spec(_ABOUT, "--lr", "0.1")
            first, out, _ = await bench.run(template, spec, COLOUR="blue", OMP_NUM_THREADS="3")
            _, again, _ = await bench.run(template, spec, COLOUR="red")
            lines = out.splitlines()
            argv = [spec.target, "--lr", "0.1"]
            assert lines[0] == f"__main__ {argv} script.py {bench.path.name}"
            assert lines[1] == "blue True 4" and lines[3] == "threads 3 torch was there"
            assert again.splitlines()[1].startswith("red"), "each has its own environment"
            assert lines[2] != again.splitlines()[2], "each draws its own random numbers"
            assert first.status is not None and first.status.is_success

            plain = bench.spec("import sys\ndef f():\n    1 / 0\nf()\n")
            process, _, errors = await bench.run(template, plain)
            fresh = subprocess.run([sys.executable, plain.target], capture_output=True, text=True)
            assert errors == fresh.stderr and str(process.status) == "exit code 1"

            for text, status in (
                ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL (killed)"),
                ("raise SystemExit(7)", "exit code 7"),
                ("raise KeyboardInterrupt", "killed by SIGINT (interrupt)"),
                ("x = ", "exit code 1"),
            ):
                process, _, _ = await bench.run(template, bench.spec(text))
                assert str(process.status) == status
        finally:
            template.end()

    asyncio.run(body())


def test_without_a_template_there_is_no_newcomer_but_an_answer(bench: _Bench) -> None:
    async def body() -> None:
        template = await bench.warm()
        os.kill(template.pid, signal.SIGKILL)
        outlet = Outlet.pipes()
        made = await template.fork(Seat(0, 0), bench.spec("pass"), {}, outlet, dies=True)
        assert made is None and not template.is_warm
        outlet.close()
        template.end()

    asyncio.run(body())


_LAUNCHER = """
import asyncio, os, sys, time
from paceline.launcher.elastic.template import Template, adopt_orphans
from paceline.launcher.outlet import Outlet
from paceline.launcher.seat import Seat
from paceline.launcher.spec import RunSpec

async def main():
    adopt_orphans()
    template = Template(os.environ)
    while not await template.hurry():
        pass
    for dies in (True, False):
        spec = RunSpec(target=sys.argv[1], num_workers=1)
        process = await template.fork(Seat(0, 0), spec, dict(os.environ), Outlet.pipes(), dies=dies)
        print(process.pid, flush=True)
    print(template.pid, flush=True)
    time.sleep(100)
asyncio.run(main())
"""


def test_who_ends_with_the_launcher(bench: _Bench) -> None:
    script = bench.spec("import time; time.sleep(100)").target
    with subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, script], stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        bound, free, template = (int(launcher.stdout.readline()) for _ in range(3))
        launcher.kill()
        wait_until(lambda: not is_alive(bound) and not is_alive(template), within_s=30)
        assert is_alive(free)
        os.kill(free, signal.SIGKILL)
        wait_until(lambda: not is_alive(free))
