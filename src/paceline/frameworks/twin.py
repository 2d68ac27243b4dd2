"""Twin: torch parameters that stand for another framework's variables, trained by pl.distribute.

TensorFlow and JAX compute gradients and, mostly, the update. What happens between workers is the
same for every framework, so they use what torch models use: buckets, paces, codecs, servers,
telemetry. A TWIN is a torch module with one parameter for each variable.

    gradients are exchanged    gradients go in, their means come out; the framework's optimizer
    (allreduce, partial ...)   updates its variables
    values are exchanged       the framework's optimizer updates its variables; values go in, and
    (local, diloco ...)        come out changed after a round
    servers update (ps, async, gradients go in, new values come out; the servers have an optimizer
    ssp ...)                   of torch.optim

Arrays go in by one copy, to engine memory. Results are views of it, valid until the next call.
Threads: one at a time; each call may come from another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.data_parallel.distribute import begin
from paceline.data_parallel.pace_switch.switcher import PaceSwitcher
from paceline.frameworks.averages import as_torch
from paceline.runtime.job import current


class ForeignUpdate(torch.optim.Optimizer):
    """An optimizer whose step is a function: the update that another framework makes."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.0})
        self.update: Callable[[], Any] = lambda: None

    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        return self.update()


class Twin:
    """The variables of one model, as torch parameters. Collective."""

    def __init__(
        self,
        names: Sequence[str],
        values: Sequence[np.ndarray],
        pace: str,
        options: Mapping[str, Any],
        make_optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] | None = None,
    ) -> None:
        """Start with rank 0's values. `make_optimizer`: the servers' one; None: the framework has
        its own."""
        self._module = nn.Module()
        for number, (name, value) in enumerate(zip(names, values, strict=True)):
            parameter = nn.Parameter(as_torch(np.array(value, order="C")))
            self._module.register_parameter(f"{number} {name.replace('.', '/')}", parameter)
        self._params = list(self._module.parameters())
        make = ForeignUpdate if make_optimizer is None else make_optimizer
        self._optimizer = make(self._params)
        self.switcher: PaceSwitcher = begin(
            current(), self._module, self._optimizer, pace, dict(options)
        )

    @property
    def size(self) -> int:
        """The number of variables."""
        return len(self._params)

    @property
    def exchanges_values(self) -> bool:
        """Whether values are exchanged after the update, at this pace."""
        return self.switcher.training.method is not None

    def values(self) -> list[np.ndarray]:
        """Return views of the values."""
        self.switcher.settle()
        return [_as_numpy(param.detach()) for param in self._params]

    def mean(self, grads: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
        """Exchange gradients; return what the workers agreed on. Counts the step, unless values
        are exchanged as well."""
        if self.switcher.training.reducer.is_local:
            return list(grads)
        self._exchange(grads)
        means = [None if p.grad is None else _as_numpy(p.grad) for p in self._params]
        if not self.exchanges_values:
            self._step(lambda: None)
        return means

    def after_update(self, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Take the values that the update made; return what the workers agreed on."""
        method = self.switcher.training.method
        assert method is not None, "the pace exchanges gradients"
        before = method.rounds
        self._step(lambda: self._set(values))
        if method.rounds == before and not method.is_free:
            return values
        return [_as_numpy(param.detach()) for param in self._params]

    def served(self, grads: Sequence[np.ndarray | None]) -> list[np.ndarray]:
        """Send gradients to the servers; return the new values."""
        self._exchange(grads)
        self._optimizer.step()
        self.switcher.before_forward()
        return self.values()

    def _exchange(self, grads: Sequence[np.ndarray | None]) -> None:
        for param, grad in zip(self._params, grads, strict=True):
            param.grad = None if grad is None else as_torch(grad).view(param.shape)
        self.switcher.training.reducer.exchange_now()

    def _step(self, update: Callable[[], None]) -> None:
        assert isinstance(self._optimizer, ForeignUpdate)
        self._optimizer.update = update
        self._optimizer.step()

    @torch.no_grad()
    def _set(self, values: Sequence[np.ndarray]) -> None:
        for param, value in zip(self._params, values, strict=True):
            param.copy_(as_torch(value).view(param.shape))


def _as_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype is not torch.bfloat16:
        return tensor.numpy()
    import ml_dtypes  # every framework with bfloat16 arrays brings it

    bits: np.ndarray = tensor.view(torch.uint16).numpy()
    return bits.view(ml_dtypes.bfloat16)
