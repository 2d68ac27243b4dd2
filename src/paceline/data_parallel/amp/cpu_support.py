"""Can this process multiply matrices of 16-bit numbers? Tried in a child, for some die of it.

A virtual machine may show a processor's flags and not allow what they stand for: then the matrix
libraries choose instructions that end the process with SIGILL (seen with oneDNN, bfloat16 and AMX).
No flag says so, and the signal cannot be survived; so a child process multiplies first. If it does
not come back, others try to do without: with oneDNN limited to older instructions, which it heeds
only if it has not been used yet (the child, a fork, is in the same state), or without oneDNN.

The child is forked, computes on its one thread and ends without cleaning up. That takes some ten
milliseconds, once for each dtype and process.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.runtime.config import set_unless_set

_PATIENCE_S = 20.0
_CHILD_FAILED = 3


ISA = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX = "AVX512_CORE_FP16"  # all that oneDNN knows, but AMX
Use = Callable[[], None]


def limit_onednn() -> None:
    """Keep oneDNN to instructions without AMX, if it has not been used in this process yet."""
    set_unless_set(ISA, WITHOUT_AMX)


def switch_onednn_off() -> None:
    """Multiply without oneDNN in this process."""
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]


def _change_nothing() -> None:
    pass


@dataclass(frozen=True)
class Trial:
    """What came of it."""

    wrong: str = ""  # what became of products as this process would do them
    remedy: Use | None = _change_nothing  # what helps; None: nothing does


@functools.cache
def trial(dtype: torch.dtype) -> Trial:
    """Find out how products of a dtype can be computed here."""
    wrong = _try_in_child(dtype, _change_nothing)
    if not wrong:
        return Trial()
    for remedy in (limit_onednn, switch_onednn_off):
        if not _try_in_child(dtype, remedy):
            return Trial(wrong, remedy)
    return Trial(wrong, None)


def _try_in_child(dtype: torch.dtype, prepare: Use) -> str:
    """Return what became of a child that multiplied; "" if it ended well."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, none of which the child needs
        pid = os.fork()
    if pid == 0:
        _be_child(dtype, prepare, writing)
    os.close(writing)
    try:
        if not select.select([reading], [], [], _PATIENCE_S)[0]:
            os.kill(pid, signal.SIGKILL)
        said = os.read(reading, 1000).decode(errors="replace")
    finally:
        os.close(reading)
        status = _reap(pid)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return "it did not end" if name == "SIGKILL" else f"it ended with {name}"
    return said if os.WEXITSTATUS(status) else ""


def _reap(pid: int) -> int:
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() > deadline_s:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def _be_child(dtype: torch.dtype, prepare: Use, writing: int) -> None:
    status = _CHILD_FAILED
    try:
        faulthandler.disable()  # no stack of a crash that is expected
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        torch.set_num_threads(1)  # threads of the parent are not there
        prepare()
        _multiply(dtype)
        status = 0
    except BaseException as error:
        os.write(writing, f"{type(error).__name__}: {error}".encode()[:900])
    finally:
        os._exit(status)


def _multiply(dtype: torch.dtype) -> None:
    """Do the products of a training step: large enough that no library takes a short cut."""
    square, batch = torch.ones(128, 128), torch.ones(4, 64, 64)
    image, filters = torch.ones(2, 32, 16, 16), torch.ones(32, 32, 3, 3)
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        product = square @ square
        torch.nn.functional.linear(square, square, square[0])
        batch @ batch
        torch.nn.functional.conv2d(image, filters)
    if product.dtype is not dtype:
        raise TypeError(f"autocast of this torch computes in {product.dtype}, not in {dtype}")
    if product[0, 0].item() != 128:
        raise ArithmeticError(f"128 ones add up to {product[0, 0].item()}")
