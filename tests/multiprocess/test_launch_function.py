"""`pl.launch`: a function on several workers, from a test or a notebook."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_support import is_alive, wait_until

import paceline as pl
from paceline.errors import ConfigError, LaunchError, UsageError
from paceline.launcher.function.launch import launch


def _children() -> set[str]:
    with open(f"/proc/self/task/{os.getpid()}/children") as children:
        return set(children.read().split())


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Any:
    before, descriptors = _children(), len(os.listdir("/proc/self/fd"))
    yield
    assert _children() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_results_come_back_in_rank_order() -> None:
    factor = 10

    def total(numbers: list[int]) -> dict[str, Any]:
        pl.init()
        tensor = torch.tensor([float(sum(numbers) + factor * pl.rank())])
        pl.world().all_reduce(tensor)
        return {"rank": pl.rank(), "total": tensor.item(), "threads": torch.get_num_threads()}

    found = launch(total, [1, 2], workers=3)
    assert found == [{"rank": r, "total": 39.0, "threads": 1} for r in range(3)]


def test_workers_find_themselves_in_the_environment() -> None:
    def told() -> list[str | None]:
        names = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "MINE", "PACELINE_PACE")
        return [os.environ.get(name) for name in names]

    found = launch(told, workers=2, env={"MINE": "x"}, pace="allreduce")
    assert found == [[str(rank), "2", "1", "x", "allreduce"] for rank in range(2)]
    assert "MINE" not in os.environ


def test_one_worker_and_a_large_result() -> None:
    assert launch(lambda: b"x" * (5 << 20), workers=1) == [b"x" * (5 << 20)]


def test_the_first_failure_is_told_with_its_traceback() -> None:
    def train() -> None:
        pl.init()
        if pl.rank() == 2:
            raise ValueError("no such file: weights.pt")
        pl.world().barrier()

    with pytest.raises(LaunchError) as caught:
        launch(train, workers=3)
    text = str(caught.value)
    assert text.startswith("rank 2 failed first: exit code 1")
    assert "ValueError: no such file: weights.pt" in text and "in train" in text
    assert "stopped because rank 2 failed" in text


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: sys.exit(3), "failed first: exit code 3"),
        (lambda: sys.exit("a message"), "a message"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL"),
        (lambda: os._exit(0), "ended without a result"),
    ],
)
def test_other_ends_are_failures_too(end: Callable[[], object], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        launch(end, workers=2)


def test_leaving_with_code_0_returns_nothing() -> None:
    assert launch(lambda: sys.exit(0), workers=2) == [None, None]


def test_a_result_that_is_not_plain_is_the_callers_mistake() -> None:
    with pytest.raises(UsageError, match=r"rank \d: the result is a torch.Tensor; .*tolist"):
        launch(lambda: torch.ones(3), workers=2)


def test_time_runs_out() -> None:
    def slow() -> None:
        if os.environ["RANK"] == "1":
            time.sleep(100)

    # Enough for the other one to end, also on a busy machine.
    with pytest.raises(LaunchError, match="^rank 1 had not finished after timeout_s=3"):
        launch(slow, workers=2, timeout_s=3)


def test_a_worker_that_has_joined_launches_nothing() -> None:
    def nested() -> None:
        pl.init()
        launch(os.getpid)

    with pytest.raises(LaunchError, match="this process has joined a job itself"):
        launch(nested, workers=2)


def _used_threads() -> str:
    code = """
        import torch
        from paceline.launcher.function.launch import launch
        torch.set_num_threads(2)
        print(launch(torch.get_num_threads, workers=2, threads=2))
        torch.ones(1 << 20).exp_()
        try:
            launch(torch.get_num_threads, threads=2)
        except ValueError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_threads_that_a_forked_worker_cannot_use_are_refused() -> None:
    fine, refused = _used_threads().splitlines()
    assert fine == "[2, 2]"
    assert "torch has already computed with threads in this process" in refused


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"workers": 0}, UsageError, r"launch\(workers=0\): expected an integer from 1"),
        ({"workers": True}, UsageError, "workers=True"),
        ({"workers": 2.0}, UsageError, "workers=2.0"),
        ({"servers": -1}, UsageError, "servers=-1"),
        ({"threads": 0}, UsageError, "threads=0"),
        ({"timeout_s": 0}, UsageError, "timeout_s=0"),
        ({"timeout_s": float("nan")}, UsageError, "timeout_s=nan"),
        ({"pace": "alreduce"}, UsageError, "did you mean allreduce"),
        ({"pace": "ssp:3"}, ConfigError, "pace ssp:3 needs parameter servers: add servers=1"),
        ({"pace": "allreduce", "servers": 1}, ConfigError, "leave out servers=1"),
        ({"env": {"RANK": "0"}}, ConfigError, "launch sets RANK"),
        ({"env": {"A": 1}}, UsageError, "expected two strings"),
        ({"env": {"A=": "1"}}, UsageError, "invalid for a variable"),
    ],
)
def test_wrong_arguments_start_nothing(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        launch(lambda: pytest.fail("started"), **arguments)


def test_something_else_than_a_function_is_refused() -> None:
    with pytest.raises(UsageError, match="expected a function, then its arguments"):
        launch(3)  # type: ignore[arg-type]


_SLEEPERS = """
    import os, pathlib, signal, subprocess, sys, time
    from paceline.launcher.function.launch import launch

    # A shell lets what it starts in the background ignore Ctrl-C, the tests perhaps among it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def sleep():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        path = pathlib.Path("pids-" + os.environ["RANK"])
        path.write_text(f"{os.getpid()} {child.pid}\\n")
        time.sleep(100)

    launch(sleep, workers=2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_process_that_launched_them(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(_SLEEPERS))
    files = [tmp_path / f"pids-{rank}" for rank in range(2)]
    with subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as launcher:
        wait_until(lambda: all(f.exists() and f.read_text().endswith("\n") for f in files))
        workers, children = zip(*(f.read_text().split() for f in files), strict=True)
        launcher.send_signal(number)
        _, errors = launcher.communicate(timeout=60)
        wait_until(lambda: not any(map(is_alive, workers + children)), within_s=40.0)
    assert launcher.returncode == -number
    if number == signal.SIGINT:
        assert errors.count("KeyboardInterrupt") == 1, "Ctrl-C is the caller's alone"
