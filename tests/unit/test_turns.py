"""Tests that run side by side take turns: a serial one is alone, and is not put off for ever."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

from support.turns import turn


def _hold(directory: Path, alone: bool, log: Path, name: str, until: Path) -> None:
    with turn(directory, alone=alone):
        with log.open("a") as file:
            file.write(f"{name} ")
        deadline_s = time.monotonic() + 60
        while not until.exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)


def test_a_serial_test_is_alone_and_comes_before_those_behind_it(tmp_path: Path) -> None:
    log, context = tmp_path / "log", multiprocessing.get_context("spawn")

    def start(name: str, alone: bool) -> multiprocessing.process.BaseProcess:
        arguments = (tmp_path, alone, log, name, tmp_path / f"end-{name}")
        process = context.Process(target=_hold, args=arguments)
        process.start()
        return process

    def begun() -> list[str]:
        return log.read_text().split() if log.exists() else []

    def wait_for(*names: str) -> None:
        deadline_s = time.monotonic() + 60
        while begun() != list(names):
            assert time.monotonic() < deadline_s, begun()
            time.sleep(0.01)

    processes = [start("one", False)]
    wait_for("one")
    processes.append(start("two", False))
    wait_for("one", "two")  # side by side
    processes.append(start("serial", True))
    time.sleep(1.0)  # until it stands at the gate; if it does not yet, the rest is no less true
    (tmp_path / "end-one").touch()
    time.sleep(0.1)
    assert begun() == ["one", "two"]
    (tmp_path / "end-two").touch()
    wait_for("one", "two", "serial")
    processes.append(start("three", False))
    time.sleep(0.3)
    assert begun() == ["one", "two", "serial"], "alone"
    for name in ("serial", "three"):
        (tmp_path / f"end-{name}").touch()
    wait_for("one", "two", "serial", "three")
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
