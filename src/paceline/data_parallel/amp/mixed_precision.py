"""precision="bf16" and "fp16": the model computes in 16 bits, its parameters stay float32.

The model's `forward` runs under torch.autocast, which gives products 16-bit copies of weights and
inputs and leaves sums, norms and losses in float32. Parameters, gradients and the optimizer's state
stay float32: master weights, without a second copy. The model's outputs are widened, so that a
script that computes its loss outside the model gets the float32 numbers that it expects.

A script that has an autocast of its own keeps it. Only `forward` of the instance is replaced;
copies of the model get the plain one back.

SUPPORT. Can this process multiply matrices of 16-bit numbers? That is tried in a child process. A
virtual machine may report a processor's flags and not allow the instructions: then the matrix
libraries choose instructions that end the process with SIGILL (seen with oneDNN, bfloat16 and AMX).
No flag reports that, and a process cannot survive the signal; so a child process multiplies first.
If it dies, further children try a workaround: oneDNN limited to older instructions, which works
only if it has not been used yet (the child, a fork, is in the same state), or no oneDNN at all.

The child is forked, computes on its one thread and exits without cleaning up. That takes some ten
milliseconds, once for each dtype and process.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import resource
import select
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from paceline.comm.devices import is_on_device
from paceline.data_parallel.hooks import StandIn, replace_forward
from paceline.errors import UsageError
from paceline.runtime.config import set_unless_set

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def find_problem_with_precision(model: nn.Module, precision: str) -> str | None:
    """Return why a model cannot compute in a precision here, or None."""
    if precision == "fp32":
        return None
    for name, param in model.named_parameters():
        if param.requires_grad and param.dtype is not torch.float32:
            words = str(param.dtype).removeprefix("torch.")
            return (
                f"precision={precision} keeps parameters in float32 and computes with narrower"
                f" copies, but {name} is {words}: give a float32 model (model.float()), or leave"
                " out precision"
            )
    if is_on_device(next(model.parameters())):
        return None  # what a processor cannot do does not matter
    if threading.current_thread() is not threading.main_thread():
        return None  # a fork beside a thread that computes is not safe: `compute_in` tries later
    support = probe_matmul(_DTYPES[precision])
    return _why_not(precision, support) if support.remedy is None else None


def _why_not(precision: str, support: MatmulSupport) -> str:
    return (
        f"precision={precision}: a product of {_DTYPES[precision]} matrices was tried in a child"
        f" process, and {support.wrong}; this processor or this build of torch cannot do it: use"
        f" precision={'bf16' if precision == 'fp16' else 'fp16'} or fp32"
    )


def compute_in(model: nn.Module, precision: str) -> str:
    """Let a model compute in a precision; return a notice for the user, or ""."""
    if precision == "fp32":
        return ""
    if is_on_device(next(model.parameters())):
        replace_forward(model, _AutocastForward(model, _DTYPES[precision]))
        return ""
    support, notice = probe_matmul(_DTYPES[precision]), ""
    if support.remedy is None:
        raise UsageError(_why_not(precision, support))
    if support.wrong:
        support.remedy()
        notice = (
            f"precision {precision}: a product was tried in a child process, and {support.wrong}:"
            f" this machine does not allow instructions that its processor shows. {_said(support)}"
        )
    replace_forward(model, _AutocastForward(model, _DTYPES[precision]))
    return notice


def _said(support: MatmulSupport) -> str:
    if support.remedy is limit_onednn:
        return f"oneDNN continues without AMX ({ISA}={WITHOUT_AMX})"
    return (
        "oneDNN, which has been used here already, is switched off, and products are much slower;"
        f" {ISA}={WITHOUT_AMX} (or AVX2) in the environment keeps it on without them"
    )


def compute_in_full(model: nn.Module) -> None:
    """Restore the model's own `forward`."""
    forward = vars(model).get("forward")
    if isinstance(forward, _AutocastForward):
        del vars(model)["forward"]
        if forward.own is not None:
            vars(model)["forward"] = forward.own


class _AutocastForward(StandIn):
    """Stands in for the `forward` of a model."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._model = weakref.ref(model)  # weak, so that the model does not hold itself
        self._dtype = dtype
        self._device = next(model.parameters()).device.type
        self.own: Callable[..., Any] | None = vars(model).get("forward")  # if not its class's

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        model = self._model()
        assert model is not None, "forward of a model that is gone"
        forward = self.own or type(model).forward.__get__(model)
        if torch.is_autocast_enabled(self._device):
            return forward(*inputs, **options)
        with torch.autocast(self._device, dtype=self._dtype):
            output = forward(*inputs, **options)
        if any(self._is_narrow(leaf) for leaf in tree_leaves(output)):
            return tree_map(lambda leaf: leaf.float() if self._is_narrow(leaf) else leaf, output)
        return output

    def _is_narrow(self, thing: Any) -> bool:
        return isinstance(thing, torch.Tensor) and thing.dtype is self._dtype

    def __reduce__(self) -> tuple[Any, ...]:
        if self.own is not None:
            return _same, (self.own,)
        # While a model is rebuilt it has no attributes yet, so this finds its class's forward.
        return getattr, (self._model(), "forward")


def _same(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


# -- can this process multiply 16-bit numbers? ----------------------------------------------------

_PATIENCE_S = 20.0
_CHILD_FAILED = 3


ISA = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX = "AVX512_CORE_FP16"  # all instructions that oneDNN knows, except AMX
Use = Callable[[], None]


def limit_onednn() -> None:
    """Limit oneDNN to instructions without AMX, if it has not been used in this process yet."""
    set_unless_set(ISA, WITHOUT_AMX)


def switch_onednn_off() -> None:
    """Multiply without oneDNN in this process."""
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]


def _change_nothing() -> None:
    pass


@dataclass(frozen=True)
class MatmulSupport:
    """Whether products of a dtype can be computed in this process, and how."""

    wrong: str = ""  # what happened to a child process that multiplied like this one
    remedy: Use | None = _change_nothing  # what helps, or None


@functools.cache
def probe_matmul(dtype: torch.dtype) -> MatmulSupport:
    """Return how products of a dtype can be computed here."""
    wrong = _try_in_child(dtype, _change_nothing)
    if not wrong:
        return MatmulSupport()
    for remedy in (limit_onednn, switch_onednn_off):
        if not _try_in_child(dtype, remedy):
            return MatmulSupport(wrong, remedy)
    return MatmulSupport(wrong, None)


def _try_in_child(dtype: torch.dtype, prepare: Use) -> str:
    """Return what happened to a child process that multiplied; "" if it succeeded."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about threads, none of which the child needs
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
        faulthandler.disable()  # no stack trace of an expected crash
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        torch.set_num_threads(1)  # the child does not have the parent's threads
        prepare()
        _multiply(dtype)
        status = 0
    except BaseException as error:
        os.write(writing, f"{type(error).__name__}: {error}".encode()[:900])
    finally:
        os._exit(status)


def _multiply(dtype: torch.dtype) -> None:
    """Compute the products of a training step, large enough that no library takes a shortcut."""
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
