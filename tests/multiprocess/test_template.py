"""Processes from the template are like fresh interpreters, and the launcher's own children."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from run_support import is_alive, wait_until

from paceline.launcher.processes.imports_ahead import FirstImport
from paceline.launcher.processes.process import ProcessOutput, RankProcess
from paceline.launcher.processes.run_script import Command
from paceline.launcher.processes.spawner import adopt_orphans
from paceline.launcher.processes.template import Template
from paceline.runtime.process_names import ProcessName

_LIGHT = ("numpy",)  # torch takes seconds, and changes nothing of what most tests here look at

# Everything that a script could tell apart, one fact in a line.
_ABOUT = """
import atexit, faulthandler, multiprocessing, os, random, resource, signal, sys, threading
main = sys.modules["__main__"]
known = ("__name__", "__file__", "__package__", "__cached__", "__doc__")
facts = {name: vars(main).get(name) for name in known}
facts["names"] = sorted(name for name in vars(main) if name.startswith("__"))
facts["spec"], facts["loader"] = __spec__ and __spec__.name, type(__loader__).__name__
facts["argv"], facts["orig_argv"], facts["path"] = sys.argv, sys.orig_argv, sys.path
facts["flags"], facts["executable"] = str(sys.flags), sys.executable
facts["environ"], facts["cwd"] = sorted(os.environ.items()), os.getcwd()
facts["shown"] = open("/proc/self/environ").read().rstrip("\\0").split("\\0")
facts["shown"] = sorted(one for one in facts["shown"])
facts["command"] = open("/proc/self/cmdline").read().rstrip("\\0").split("\\0")
facts["signals"] = [str(signal.getsignal(number)) for number in range(1, 32)]
facts["mask"] = signal.pthread_sigmask(signal.SIG_BLOCK, ())
facts["session"] = os.getsid(0) == os.getpgrp() == os.getpid()
facts["priority"], facts["umask"] = os.getpriority(os.PRIO_PROCESS, 0), os.umask(0)
facts["limits"] = [resource.getrlimit(number) for number in range(16)]
facts["files"] = sorted(os.listdir("/proc/self/fd"))[:4]
facts["input"] = sys.stdin.read()
for stream in (sys.stdin, sys.stdout, sys.stderr):
    facts[stream.name] = (stream.encoding, stream.errors, stream.line_buffering, stream.isatty())
facts["seeks"] = sys.stdout.seekable(), sys.stdout.write_through
facts["faults"], facts["thread"] = faulthandler.is_enabled(), threading.current_thread().name
facts["process"] = multiprocessing.current_process().name, multiprocessing.get_start_method()
facts["recursion"], facts["switch"] = sys.getrecursionlimit(), sys.getswitchinterval()
facts["children"] = open(f"/proc/self/task/{os.getpid()}/children").read()
for name, fact in facts.items():
    print(name, "=", fact)
atexit.register(print, "at exit")
"""


class _Bench:
    """Runs a script from a template, and the same in a fresh interpreter."""

    def __init__(self, path: Path) -> None:
        self.path = path
        more = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1"}
        self.environ = {**os.environ, **more}
        self.said: list[str] = []

    def template(self, *modules: str) -> Template:
        return Template.start(self.environ, modules or _LIGHT, self.said.append, 1000)

    def script(self, text: str, *arguments: str) -> Command:
        script = self.path / "script.py"
        script.write_text(text)
        return Command("script", str(script), arguments)

    async def run(
        self, template: Template, command: Command, **environ: str
    ) -> tuple[RankProcess, str, str]:
        assert await template.is_ready(), template.why_not
        output, environ = ProcessOutput.pipes(), {**self.environ, **environ}
        process = await template.fork(ProcessName(0, 0), command, environ, output, dies=True)
        assert process is not None
        while not process.check_ended():
            await asyncio.sleep(0.005)
        texts = _read_now(output.stdout_fd), _read_now(output.stderr_fd)
        process.release()
        return process, texts[0].decode(), texts[1].decode()

    def fresh(self, command: Command, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command.argv,
            env={**self.environ, **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            start_new_session=True,
            check=False,
        )


def _read_now(fd: int) -> bytes:
    """Read what is there: a helper that the script has left may still hold the far end."""
    with suppress(BlockingIOError):
        return os.read(fd, 1 << 16)
    return b""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[_Bench]:
    adopt_orphans()
    yield _Bench(tmp_path)
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: not for the other tests


def test_a_process_is_like_a_fresh_interpreter(
    bench: _Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By path, relative, as a module, as a package, as a zip file, with several settings."""
    monkeypatch.chdir(bench.path)
    (bench.path / "pack").mkdir()
    for name in ("pack/__init__.py", "pack/__main__.py", "pack/inner.py", "linked.py"):
        (bench.path / name).write_text("" if name.endswith("__init__.py") else _ABOUT)
    os.symlink("linked.py", "link.py")
    subprocess.run([sys.executable, "-m", "zipapp", "pack", "-o", "pack.pyz"], check=True)
    programs = [
        bench.script(_ABOUT, "--lr", "0.1", "a b"),
        Command("script", "script.py", ()),
        Command("script", "link.py", ()),
        Command("script", "pack/inner.py", ()),
        Command("script", "pack.pyz", ("-v",)),
        Command("module", "pack", ("x",)),
        Command("module", "pack.inner", ()),
    ]

    async def body() -> None:
        template = bench.template()
        try:
            for command in programs:
                process, out, errors = await bench.run(template, command, COLOUR="blue")
                fresh = bench.fresh(command, COLOUR="blue")
                assert out.splitlines() == fresh.stdout.splitlines() and errors == fresh.stderr
                assert process.status is not None and process.status.is_success
                assert "at exit" in out and "COLOUR=blue" in out
            out = (await bench.run(template, programs[0], PYTHONSAFEPATH="1"))[1]
            assert str(bench.path) not in re.findall(r"^path = (.*)", out, re.MULTILINE)[0]
        finally:
            template.end()

    asyncio.run(body())


_ENDS = {
    "import os; os.kill(os.getpid(), 9)": "killed by SIGKILL (killed)",
    "raise SystemExit(7)": "exit code 7",
    "raise SystemExit('some words')": "exit code 1",
    "import os; os._exit(3)": "exit code 3",
    "raise KeyboardInterrupt": "killed by SIGINT (interrupt)",
    "x = ": "exit code 1",
    "import sys\ndef f():\n    1 / 0\nf()\n": "exit code 1",
    "import sys\nsys.excepthook = lambda *_: print('hooked')\n1 / 0\n": "exit code 1",
    "import threading, time\nx = 'alive'\n"
    "threading.Thread(target=lambda: (time.sleep(0.2), print(x))).start()": "exit code 0",
    "from __main__ import y": "exit code 1",
    "import atexit, sys\natexit.register(lambda: print(sys.last_value))\n1 / 0\n": "exit code 1",
    "def f(x: Undefined): pass": "exit code 1",
    "raise SystemExit(-1)": "exit code 255",
    "class C:\n    def __del__(self):\n        print('gone')\nc = C()\n": "exit code 0",
    "class C:\n    def __del__(self):\n        print('gone')\nc = C()\nc.c = c\n": "exit code 0",
    "f = open('unclosed', 'w')\nf.write('x' * 10)\n"
    "import atexit, os\n"
    "atexit.register(lambda: print(os.path.getsize('unclosed')))\n": "exit code 0",
}


@pytest.mark.parametrize("local_workers", ["1", "64"])  # many end without a full finalization
def test_scripts_end_as_in_a_fresh_interpreter(
    bench: _Bench, local_workers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bench.path)

    async def body() -> None:
        template = bench.template()
        try:
            for text, status in _ENDS.items():
                command = bench.script(text)
                environ = {"PACELINE_LOCAL_WORLD_SIZE": local_workers}
                process, out, errors = await bench.run(template, command, **environ)
                fresh = bench.fresh(command)
                assert str(process.status) == status, text
                assert (out, errors) == (fresh.stdout, fresh.stderr), text
                if "unclosed" in text:
                    assert (bench.path / "unclosed").read_text() == "x" * 10
                    (bench.path / "unclosed").unlink()
        finally:
            template.end()

    asyncio.run(body())


_SPAWNS = """
import multiprocessing
def double(x):
    return 2 * x
if __name__ == "__main__":
    for method in ("spawn", "fork", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(double, [21]))
"""


def test_a_script_has_its_own_threads_random_numbers_and_children(bench: _Bench) -> None:
    draws = "import random, numpy, torch, multiprocessing as m\nprint(numpy.random.rand())\n"
    draws += "print(torch.rand(()).item())\n"
    draws += "print(random.random())\nprint(bytes(m.current_process().authkey).hex())\n"
    counts = "import sys\nwas_there = 'torch' in sys.modules\nimport torch\n"
    counts += "torch.randn(300, 300) @ torch.randn(300, 300)\ntorch.ones(1 << 20).exp_()\n"
    counts += "print(was_there, torch.get_num_threads())"

    async def body() -> None:
        bench.environ["OMP_NUM_THREADS"] = "2"  # numpy's library then has a thread when it is there
        template = bench.template("numpy", "torch")
        try:
            assert (await bench.run(template, bench.script(_SPAWNS)))[1] == (
                "spawn [42]\nfork [42]\nforkserver [42]\n"
            )
            command = bench.script(draws)
            one, two = [(await bench.run(template, command))[1].split() for _ in range(2)]
            assert all(a != b for a, b in zip(one, two, strict=True)), "each draws its own"
            command = bench.script(counts)
            for threads in ("2", "1"):
                out = (await bench.run(template, command, OMP_NUM_THREADS=threads))[1]
                fresh = bench.fresh(command, OMP_NUM_THREADS=threads).stdout
                assert out.split()[1:] == fresh.split()[1:] and out.split()[0] == "True"
        finally:
            template.end()

    asyncio.run(body())


def test_a_module_of_the_script_with_the_name_of_an_imported_one_wins(bench: _Bench) -> None:
    (bench.path / "profile.py").write_text("mine = True\n")

    async def body() -> None:
        template = bench.template("profile")
        try:
            command = bench.script("import profile\nprint(profile.mine)")
            process, out, errors = await bench.run(template, command)
            assert (out, errors, str(process.status)) == ("True\n", "", "exit code 0")
        finally:
            template.end()

    asyncio.run(body())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "from threading import *\nThread(target=Event().wait, daemon=True).start()",
            "a module has started a thread while it was imported",
        ),
        ("print('some words')\n1 / 0", "it ended while it imported modules"),
    ],
)
def test_what_forbids_a_fork_is_said(bench: _Bench, text: str, why: str) -> None:
    (bench.path / "mischief.py").write_text(text)
    bench.environ["PYTHONPATH"] = str(bench.path)

    async def body() -> None:
        template = bench.template("mischief")
        assert not await template.is_ready() and template.why_not == why
        await asyncio.sleep(0.05)
        template.end()

    asyncio.run(body())
    if "words" in text:  # what an import prints is for people
        assert bench.said[0] == "some words" and bench.said[-1].startswith("ZeroDivisionError")


def test_an_import_that_takes_long_is_named(bench: _Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.launcher.processes.template._SLOW_S", 0.05)
    (bench.path / "slow.py").write_text("import time\ntime.sleep(0.5)\n")
    bench.environ["PYTHONPATH"] = str(bench.path)

    async def body() -> None:
        template = bench.template("slow")
        assert await template.is_ready() and await template.is_ready()
        template.end()

    asyncio.run(body())
    (line,) = bench.said
    assert "has imported slow, which takes more than 0.05 s" in line


def test_a_second_template_has_what_a_script_imports_first(bench: _Bench) -> None:
    """It stops at a module that is not installed, and scripts cannot tell it from the first."""
    (bench.path / "mine.py").write_text("print('only the script imports this')\n")
    bench.environ["PYTHONPATH"] = str(bench.path)
    looks = "import sys\nprint(*(name in sys.modules for name in sys.argv[1:]))"
    first = [FirstImport("packaging", ("version",)), FirstImport("mine"), FirstImport("xml.dom")]

    async def body() -> None:
        template = bench.template()
        assert await template.is_ready()
        second = await template.fork_template(first)
        assert second is not None and await second.is_ready()
        template.end()  # the second one does not need it
        try:
            command = bench.script(looks, "packaging.version", "mine", "xml.dom")
            assert (await bench.run(second, command))[1] == "True False False\n"
            command = bench.script(_ABOUT, "x")
            out = (await bench.run(second, command, COLOUR="blue"))[1]
            assert out == bench.fresh(command, COLOUR="blue").stdout
        finally:
            second.end()

    asyncio.run(body())


def test_a_second_template_whose_imports_open_a_file_is_not_forked_from(bench: _Bench) -> None:
    (bench.path / "known").mkdir()
    (bench.path / "known" / "__init__.py").touch()
    (bench.path / "known" / "opener.py").write_text("file = open('/dev/null')\n")
    bench.environ["PYTHONPATH"] = str(bench.path)

    async def body() -> None:
        template = bench.template("known")
        assert await template.is_ready()
        second = await template.fork_template([FirstImport("known.opener")])
        assert second is not None and not await second.is_ready()
        assert second.why_not == "a module has opened a file while it was imported"
        second.end()
        template.end()

    asyncio.run(body())


def test_without_a_template_there_is_no_process_but_an_answer(bench: _Bench) -> None:
    async def body() -> None:
        template = bench.template()
        assert await template.is_ready()
        os.kill(template.pid, signal.SIGKILL)
        output = ProcessOutput.pipes()
        made = await template.fork(ProcessName(0, 0), bench.script("pass"), {}, output, dies=True)
        assert made is None and template.why_not == "it has ended"
        output.close()
        template.end()

    asyncio.run(body())


_LAUNCHER = """
import asyncio, os, sys, time
from paceline.launcher.processes.run_script import Command
from paceline.launcher.processes.process import ProcessOutput
from paceline.runtime.process_names import ProcessName
from paceline.launcher.processes.spawner import adopt_orphans
from paceline.launcher.processes.template import Template

async def main():
    adopt_orphans()
    template = Template.start(os.environ, ("json",), print)
    assert await template.is_ready()
    for dies in (True, False):
        command = Command("script", sys.argv[1], ())
        environ, output = dict(os.environ), ProcessOutput.pipes()
        process = await template.fork(ProcessName(0, 0), command, environ, output, dies=dies)
        print(process.pid, flush=True)
    print(template.pid, flush=True)
    time.sleep(100)
asyncio.run(main())
"""


def test_who_ends_with_the_launcher(bench: _Bench) -> None:
    script = bench.script("import time; time.sleep(100)").target
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
