"""The actor on a node of Ray, without Ray: its agent, the function and the results."""

from __future__ import annotations

import os
import sys

from paceline.launcher.engines.ray.node_actor import SOCKET_VARIABLE, NodeActor
from paceline.launcher.hosts.repeated_output import RepeatedOutput
from paceline.runtime.process_names import ProcessName

# An agent that reads a line, then does what a worker does, and ends with its standard input.
AGENT = f"""
import os, sys
from paceline.launcher.engines.ray.node_actor import fetch_function, send_result
print("got", sys.stdin.readline().strip(), file=sys.stderr, flush=True)
name = os.environ[{SOCKET_VARIABLE!r}]
send_result(name, 7, fetch_function(name) * 2)
sys.stdin.read()
sys.exit(3)
"""


def test_an_agent_gets_its_bytes_and_its_workers_a_function():
    actor = NodeActor()
    assert actor.facts() == (os.getcwd(), sys.executable)
    actor.start([sys.executable, "-c", AGENT], b"invitation\n", b"function" * 100_000)
    lines, code, results = actor.next()
    assert (lines, code, results) == (["got invitation"], None, {})
    actor.end(False)
    lines, code, results = actor.next()
    assert (lines, code) == ([], 3)
    assert results == {7: b"function" * 200_000}


def test_an_agent_is_killed():
    actor = NodeActor()
    actor.start(["sleep", "100"], b"", None)
    actor.end(True)
    assert actor.next() == ([], -9, {})


class Kept:
    """A sink that keeps what it gets."""

    is_behind = False

    def __init__(self) -> None:
        self.data = b""

    def feed(self, is_error: bool, data: bytes) -> None:
        del is_error
        self.data += data

    def finish(self, is_error: bool) -> None:
        del is_error


def test_output_is_repeated_in_whole_lines(capfd):
    kept = Kept()
    sink = RepeatedOutput(ProcessName(3, 3), kept)
    for part in (b"one\ntw", b"o\n", b"three"):
        sink.feed(False, part)
    sink.finish(False)
    sink.finish(True)
    assert kept.data == b"one\ntwo\nthree"
    assert capfd.readouterr().out == "[3] one\n[3] two\n[3] three\n"
