"""The first cause is found among consequences, and said in words."""

from __future__ import annotations

import signal

import pytest

from paceline.launcher.outcome import failure_report, why_killed
from paceline.launcher.processes.process import ExitStatus
from paceline.launcher.processes.table import ProcessResult, first_cause, traceback_tail
from paceline.runtime.machine import MemoryInfo, OomCount
from paceline.runtime.process_names import ProcessName

_CAUSE = ["noise", "Traceback (most recent call last):", '  File "x.py"', "ValueError: boom"]
_LOST = ["Traceback (most recent call last):", '  File "y.py"', "paceline.errors.PeerLost: rank 2"]
_GLOO = [
    "Traceback (most recent call last):",
    "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1",
]
_MEMORY = MemoryInfo(
    total_bytes=8 << 30, available_bytes=1, limit_bytes=1 << 30, peak_bytes=1 << 30
)


def _failed(rank: int, stderr: list[str], **more: object) -> ProcessResult:
    fields = {"pid": 100 + rank, "status": ExitStatus(1), "ran_s": 1.0, **more}
    return ProcessResult(name=ProcessName(rank, rank), stderr_tail=stderr, **fields)  # type: ignore[arg-type]


def test_a_cause_is_chosen_before_earlier_consequences() -> None:
    results = [_failed(0, _LOST), _failed(1, _GLOO), _failed(2, _CAUSE)]
    assert first_cause(results) == results[2]
    assert first_cause(results[:2]) == results[0]
    wrapped = ["Traceback (most recent call last):", "RuntimeError: PeerLost: rank 2 ended"]
    assert _failed(0, wrapped).is_consequence
    crash = ExitStatus(None, signal.SIGSEGV)
    assert not _failed(0, [*_LOST, "Fatal Python error: x"], status=crash).is_consequence
    assert first_cause([]) is None


def test_a_consequence_that_was_wrapped_is_still_one() -> None:
    chained = [
        *_LOST,
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "Traceback (most recent call last):",
        "RuntimeError: training failed",
    ]
    assert _failed(0, chained).is_consequence
    assert traceback_tail(["before", *chained]) == chained


def test_what_torch_puts_before_each_line_is_not_looked_at() -> None:
    assert _failed(0, [f"[rank1]: {line}" for line in _LOST]).is_consequence
    assert traceback_tail([f"[rank1]: {line}" for line in _CAUSE]) == _CAUSE[1:]
    evicted = "paceline.errors.Evicted: rank 3 is retired with its unit: worker 2 (h:1): killed"
    assert _failed(0, [*_LOST[:2], evicted]).is_consequence
    over = "paceline.errors.JobOver: the job is over: 1 worker is left, expected at least 2"
    assert _failed(0, [*_LOST[:2], over]).is_consequence


def test_words_about_lost_peers_outside_a_traceback_prove_nothing() -> None:
    assert not _failed(0, ["PeerLost: handled, going on", *_CAUSE]).is_consequence
    assert not _failed(0, ["PeerLost: handled, going on"]).is_consequence


def test_ranks_with_the_same_end_share_a_line() -> None:
    stopped = [
        _failed(r, [], was_stopped=True, status=ExitStatus(None, signal.SIGTERM))
        for r in range(64)
        if r != 7
    ]
    first = _failed(7, _CAUSE)
    text = failure_report([*stopped[:7], first, *stopped[7:]], first, why_killed=None)
    assert "rank 7 failed first: exit code 1 after 1.0 s" in text
    assert text.splitlines()[-1] == "paceline: ranks 0-6, 8-63: stopped because rank 7 failed"


def test_last_words_fall_back_to_standard_output() -> None:
    first = _failed(0, [], last_stdout="epoch 3")
    assert "last line of output: epoch 3" in failure_report([first], first, why_killed=None)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (OomCount(0, 0), OomCount(0, 0), "no sign of the OOM killer"),
        (OomCount(3, 5), OomCount(4, 6), "possibly out of memory: .* control group .*1 GiB"),
        (OomCount(0, 5), OomCount(0, 6), "possibly out of memory: .* this machine"),
    ],
)
def test_out_of_memory_needs_evidence(before: OomCount, after: OomCount, words: str) -> None:
    import re

    text = why_killed(ExitStatus(None, signal.SIGKILL), before, after, _MEMORY)
    assert text is not None and re.search(words, text)
    assert why_killed(ExitStatus(None, signal.SIGSEGV), before, after, _MEMORY) is None


def test_exit_status_in_words() -> None:
    assert str(ExitStatus(3)) == "exit code 3"
    assert str(ExitStatus(None, signal.SIGSEGV)) == "killed by SIGSEGV (segmentation fault)"
    assert str(ExitStatus(None, 50)).startswith("killed by signal 50")
    assert ExitStatus(None, signal.SIGKILL).shell_code == 137
